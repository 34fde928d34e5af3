"""Settings of the processes that compute rewards."""

from typing import Annotated

from ..config_base import Config, Count, Natural, Seconds, Unit


class RewardsConfig(Config):
    """The pool of processes for [`compute_reward`](environments.md#rewards-that-compute): functions of a recipe that
    compute rewards, such as unit tests of an answer. Each call has a deadline; a call whose process has ended is begun
    again."""

    services: Annotated[Natural, Unit("actors")] = 0
    """Reward services, `rewards-0`, `rewards-1` and so on, each with processes of its own that all rollout workers
    use. `rewards-n` is on the host of `rollout-n`, whose calls it gets before others. 0: a reward is computed in the
    processes of its rollout worker (`rollout.processes`)."""
    processes: Annotated[Count, Unit("processes")] = 4
    """Most processes of each service."""
    timeout_s: Seconds = 60.0
    """Deadline of a call, from the time on at which a process is free for it. Then that process is killed, and the
    workflow gets a TimeoutError."""
    queue_timeout_s: Seconds = 600.0
    """Deadline of the wait for a process that is free."""
    retries: Natural = 2
    """Number of times that a call is begun again because its process has ended."""
