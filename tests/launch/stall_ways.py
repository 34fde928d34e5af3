"""The ways in which a run stands still, for the tests of each and for ``scripts/bench/run stalls``."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .conftest import TINY, Launched, wait_until

STALLS = Path(__file__).parent / "recipes" / "stalls"
MODEL = {
    "tokenizer": str(TINY / "tokenizer"),
    "config": {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 14,
        "tie_word_embeddings": False, "max_position_embeddings": 64,
    },
}  # fmt: skip
REAL = (f"agent_defaults.model={json.dumps(MODEL)}", "engine={name: embedded}", "trainer={name: torch}")
STOPPED = r"{} \(process \d+, stopped by a signal: `kill -CONT \d+` continues it\) does not answer"
TRAJECTORY_LIMIT = r"rollout\.trajectory_timeout_s=1800 ends it"


def nothing(run: Launched) -> None:
    """The recipe stands still by itself."""


def wait_for_checkpoint(run: Launched) -> None:
    """Returns once there is one. It may be saved some steps after its own."""
    wait_until(
        lambda: any(event["event"] == "checkpoint_saved" for event in run.events), f"a checkpoint\n{run.text}"
    )


def stop(actor: str) -> Callable[[Launched], None]:
    def trouble(run: Launched) -> None:
        wait_for_checkpoint(run)
        run.actors()[actor].suspend()

    return trouble


def stop_fork_server(run: Launched) -> None:
    """A rollout worker is killed, and the process that would fork its next life is stopped."""
    wait_for_checkpoint(run)
    worker = run.actors()["rollout-0"]
    parent = worker.parent()
    assert parent is not None
    parent.suspend()
    worker.kill()


@dataclass(frozen=True)
class Stall:
    """``settings``: of the run. ``cause``: a pattern of the line that names it. ``trouble``: from outside."""

    settings: tuple[str, ...]
    cause: str
    trouble: Callable[[Launched], None] = nothing
    checkpoint: bool = True


STALLED = {
    "one trajectory": Stall(
        ("data.hang=one",),
        r"rollout-0: 1 trajectory \(3:q2_\d\) at workflow.py:\d+, in _wait_for_ever: await asyncio.Event\(\).wait\(\), "
        rf"for .*; {TRAJECTORY_LIMIT}",
    ),
    "all trajectories, behind a gather": Stall(
        ("data.hang=all",),
        r"rollout-0: 4 trajectories \(3:q2_0, 3:q2_1, 3:q2_2, ...\) at workflow.py:\d+, in _wait_for_ever: ",
    ),
    "a lock that is never released": Stall(
        ("data.hang=lock",), r"rollout-0: 3 trajectories .* at .*, in _stand_still: await _lock.acquire\(\)"
    ),
    "in_process": Stall(
        ("data.hang=process",),
        r"rollout-0: 4 trajectories .* in _stand_still: await in_process\(_compute_for_ever",
    ),
    "a reward": Stall(
        ("data.hang=reward", "rewards={services: 1, timeout_s: 3600}"),
        r"rewards-0: workflow._compute_for_ever, which computes \(4 times\), for .*; rewards.timeout_s=3600 ends it",
    ),
    "a loop that is blocked": Stall(
        ("data.hang=blocked", "supervision.missed_heartbeats=100"),
        r"rollout-0 \(process \d+\) does not answer; the workflow blocks its event loop: workflow.py:\d+, in "
        r"_compute_for_ever: time.sleep",
    ),
    "train_query": Stall(
        ("data.hang=train_query",),
        r"orchestrator: train_query of workflow.py, at workflow.py:\d+, in _compute_for_ever: time.sleep\(3600.0\), "
        r"for .*; training.data_timeout_s=600 ends it",
    ),
    "eval_queries": Stall(
        ("data.hang=eval_queries",),
        r"orchestrator: eval_queries of workflow.py, at workflow.py",
        checkpoint=False,
    ),
    "evaluation": Stall(
        ("data.hang=evaluation",),
        r"rollout-0: 1 trajectory \(eval:e0_0\) at workflow.py:\d+, in _wait",
        checkpoint=False,
    ),
    "setup": Stall(
        ("data.hang=setup",),
        r"rollout-0: setup\(\) of the recipe, at workflow.py:\d+, in _wait_for_ever: .*; "
        r"rollout.setup_timeout_s=600 ends it",
        checkpoint=False,
    ),
    "setup blocks": Stall(
        ("data.hang=setup blocks",), r"rollout-0 \(process \d+\) does not answer", checkpoint=False
    ),
    "supervised batches": Stall(
        ("data.hang=sft", "agent_defaults.sft.batches=1", *REAL),
        r"trainer: supervised batches 0 to 0 of solver, which computes at workflow.py:\d+, in _compute_for_ever: "
        r"time.sleep\(3600.0\), for .*; training.compute_timeout_s=3600 ends it",
        checkpoint=False,
    ),
    "an engine": Stall(
        ("engine.token_s=1000",),
        r"solver-0: a turn of solver from the engine simulated \(4 times\), for .*; rollout.turn_timeout_s ends it",
        checkpoint=False,
    ),
    "a trainer": Stall(
        ("trainer.micro_batch_s=1000",),
        r"trainer: a micro-batch of solver, 4 samples, which computes, for .*; training.compute_timeout_s=3600",
        checkpoint=False,
    ),
    "a slot": Stall(
        ("trainer.micro_batch_s=1000", "pool={name: shared, slots: 1}"),
        r"slot-0: a micro-batch of solver, 4 samples, which computes, for .*; training.compute_timeout_s=3600",
        checkpoint=False,
    ),
    "the only instance is stopped": Stall((), STOPPED.format("solver-0"), stop("solver-0")),
    "the trainer is stopped": Stall((), STOPPED.format("trainer"), stop("trainer")),
    "the orchestrator is stopped": Stall((), STOPPED.format("orchestrator"), stop("orchestrator")),
    "the store is stopped": Stall((), STOPPED.format("store"), stop("store")),
    "the fork server is stopped": Stall(
        (),
        r"a process for rollout-0, from the process that forks actors \(process \d+, stopped",
        stop_fork_server,
    ),
    "a judge outside the run": Stall(
        ("agents.solver.columns.reward={type: float, required: true, written_by: external}",),
        r"rollout-0: 4 trajectories .* for rewards that a program outside the run gives: does the judge run\?",
        checkpoint=False,
    ),
    "columns from outside": Stall(
        ("agents.solver.columns.grade={type: float, required: true, written_by: external}",),
        r"store: grade of samples of solver, from a program outside the run, for .*; "
        r"agents.solver.columns.grade.timeout_s=600 ends it",
        checkpoint=False,
    ),
    "a full store": Stall(
        (
            "store={memory_bytes: 65536, disk_bytes: 0}",
            "agent_defaults.sampling.max_new_tokens=500",
            "engine={name: simulated, median_tokens: 400}",
            "training.queries_per_step=16",
            "trainer.micro_batch_s=1000",
        ),
        r"store: room for samples: .*; store.room_timeout_s=1800 ends it",
        checkpoint=False,
    ),
}


def causes(run: Launched) -> list[str]:
    return [cause for event in run.events if event["event"] == "run_stalled" for cause in event["causes"]]
