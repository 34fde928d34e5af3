"""Reward functions that compute for long: in the processes of the run's reward services, or of their worker.

    workflow ── compute_reward(f, ...) ─> the worker's pool ─┬─> a reward service, with processes for all workers
                                                             └─> a process of this worker, without services

A reward function is stateless: a call may be repeated, and in any process. So a process that is killed costs the time
of one call, and no sample (RollArt, arXiv 2512.22560, has its rewards in a serverless pool for the same reason).
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from .process_pool import Pool, run_in

Result = TypeVar("Result")

current_reward_pool: ContextVar[Pool | None] = ContextVar("current_reward_pool", default=None)
"""The pool of the trajectory whose workflow runs."""


async def compute_reward(
    function: Callable[..., Result], *args: Any, timeout_s: float | None = None
) -> Result:
    """The result of ``function(*args)``, as ``in_process`` gives it, for a function that computes a reward: it has no
    state, so that it may be called again, at any host of the run.

    ``timeout_s``: of the computation; None: ``rewards.timeout_s``. The trajectory's deadline does not pass meanwhile.

    Raises TimeoutError after ``timeout_s``, when the process was killed, and after ``rewards.queue_timeout_s`` without
    a process that is free; ProcessFailed for an error of the function, and if its process has ended too often;
    ValueError for a function or an argument that can't be sent.
    """
    return await run_in(current_reward_pool.get(), function, args, timeout_s)
