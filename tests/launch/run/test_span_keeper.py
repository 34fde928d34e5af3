"""The spans of whole runs: every kind, from each part, with flows from a turn to the instances that it changed."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from flexmarl.actors.spans import KINDS, Span
from flexmarl.core.errors import SystemClosed
from flexmarl.core.spans import SpanBatch
from flexmarl.core.testing import virtual_time
from flexmarl.launch.monitoring.timeline.links import KEY_SETS, links_of
from flexmarl.launch.monitoring.timeline.span_keys import SpanKeys
from flexmarl.launch.monitoring.timeline.stored_spans import StoredSpans
from flexmarl.launch.run.run_supervision import RunSupervision
from flexmarl.launch.run.span_keeper import SpanKeeper
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.spans.span_log import SpanLog
from flexmarl.launch.run_folder.spans.trace_config import TraceConfig

from ...core.span_batches import timeless_recorder
from ..conftest import SIMULATED_POLICIES, Launched
from ..in_process import RunsHere

OF_A_POOL = {"copy", "resume", "suspend"}
OF_A_MOVE = {"move"}
CLOCKS_S = 5.0
"""The wall clock of a machine may be set while a run runs."""


def stored(run: Path) -> StoredSpans:
    spans = StoredSpans(RunDirectory.existing(run).trace)
    assert spans.refresh()
    return spans


def all_spans(spans: StoredSpans) -> list[Span]:
    return spans.spans(range(spans.size))


@pytest.fixture(scope="module")
def spans(whole: Launched) -> StoredSpans:
    return stored(whole.directory)


def test_a_run_has_spans_of_every_kind(spans: StoredSpans) -> None:
    assert {span.kind for span in all_spans(spans)} >= KINDS.keys() - OF_A_POOL - OF_A_MOVE - {
        "wait",
        "environment",
        "generate",  # of engines that can't tell prefill and decode apart
    }
    assert {*spans.kinds} <= KINDS.keys()
    assert spans.dropped == 0


def test_a_shared_pool_has_its_moves(runs_here: RunsHere) -> None:
    settings = ("pool={name: shared, slots: 1}", "training.steps=2", *SIMULATED_POLICIES)
    run = runs_here.train("pooled", *settings)
    assert run.status == 0, run.text
    lanes = {(span.lane, span.kind) for span in all_spans(stored(run.directory))}
    assert {
        ("slot-0", kind) for kind in (*OF_A_POOL, "build", "publish", "micro_batch", "optimizer")
    } <= lanes


def test_each_part_has_its_lanes_and_its_host(spans: StoredSpans) -> None:
    roles = {lane.name: lane.role for lane in spans.lanes}
    assert roles == {
        "trainer": "slot",
        "trainer samples": "slot",
        "solver-0": "instance",
        "checker-0": "instance",
        "router": "router",
        "store": "store",
        "orchestrator": "orchestrator",
        "rollout-0 turns": "rollout",
        "rollout-0 trajectories": "rollout",
    } | {name: "rollout" for name in roles if name == "rollout-0 environment"}
    assert all(lane.node for lane in spans.lanes)


def test_what_was_counted_was_recorded(whole: Launched, spans: StoredSpans) -> None:
    """Every micro-batch, every sample and every step, also those of the last second."""
    counts = Counter(span.kind for span in all_spans(spans))
    policies = ("solver", "checker")
    samples = sum(line[f"samples/{policy}"] for line in whole.metrics for policy in policies)
    assert counts["sample"] == samples
    assert counts["step"] == len(whole.metrics)
    assert counts["optimizer"] == len(policies) * len(whole.metrics)
    assert counts["micro_batch"] == counts["lease"]
    assert counts["turn"] >= counts["sample"] and counts["decode"] >= counts["turn"]
    assert counts["prefill"] >= counts["decode"] and not counts["generate"]


def test_a_turn_leads_to_its_instances_and_an_install_comes_from_its_turns(spans: StoredSpans) -> None:
    everything = all_spans(spans)
    span_keys = SpanKeys(spans, KEY_SETS)

    def reached(number: int, direction: str) -> Counter[str]:
        links = [link for link in links_of(spans, span_keys, number) if link.relation == direction]
        return Counter(everything[link.id].kind for link in links)

    def is_of(number: int, kind: str, **attributes: Any) -> bool:
        span = everything[number]
        return span.kind == kind and all(getattr(span, name) == value for name, value in attributes.items())

    turn = next(n for n in range(len(everything)) if is_of(n, "turn", step=2, agent="solver"))
    after = reached(turn, "after")
    after.pop("wait", None)
    assert after == {
        "prefill": 1, "decode": 1, "sample": 1, "micro_batch": 1, "optimizer": 1, "step": 1, "publish": 1,
        "versions": 1, "install": 1,
    }  # fmt: skip
    assert reached(turn, "before") == {"trajectory": 1}

    install = next(n for n in range(len(everything)) if is_of(n, "install", policy="checker", version=3))
    before = reached(install, "before")
    assert before["publish"] == before["optimizer"] == 1
    assert before["turn"] == before["sample"] > 0 and before["micro_batch"] == before["lease"] > 0


def test_a_part_lies_within_the_whole(spans: StoredSpans) -> None:
    everything = all_spans(spans)
    trajectories = {
        (span.query, span.trajectory, span.step): span for span in everything if span.kind == "trajectory"
    }
    for span in everything:
        if span.kind in ("turn", "prefill", "decode") and span.step > 0:
            whole = trajectories[span.query, span.trajectory, span.step]
            assert whole.begin - CLOCKS_S <= span.begin <= span.end <= whole.end + CLOCKS_S


@pytest.mark.parametrize(
    ("settings", "kinds"), [("trace.enabled=false", set[str]()), ("trace.sample=1.0e-9", KINDS)]
)
def test_without_a_trace_nothing_is_written_and_of_a_share_only_the_few(
    runs_here: RunsHere, settings: str, kinds: set[str]
) -> None:
    run = runs_here.train(f"off-{bool(kinds)}", "training.steps=2", *SIMULATED_POLICIES, settings)
    assert run.status == 0, run.text
    spans = StoredSpans(RunDirectory.existing(run.directory).trace)
    assert spans.refresh() == bool(kinds)
    # Before the first call a process does not know the share.
    assert {*spans.kinds} <= {*kinds}
    assert bool(kinds) == ("optimizer" in spans.kinds)


# The first one ends the run in the orchestrator's process, the second one in the rollout worker's.
@pytest.mark.parametrize("fault", ["raise", "unknown agent"])
def test_a_run_that_has_failed_has_the_spans_of_its_end(runs_here: RunsHere, fault: str) -> None:
    faults = f"data.faults=[{fault}]", "data.faulty=9"
    run = runs_here.train(f"failed-{fault.split()[0]}", *faults, *SIMULATED_POLICIES)
    assert run.status == 1, run.text
    spans = all_spans(stored(run.directory))
    assert {"publish", "load", "install"} <= {span.kind for span in spans}
    # The process of the rollout worker has ended before the run asks for the last spans: by its error, or because the
    # orchestrator, which it reports to, has failed.
    assert ("trajectory", "q000") in {(span.kind, span.query) for span in spans}


class FakeSupervision:
    """One process that records, and one that never answers."""

    def __init__(self) -> None:
        self.recorder = timeless_recorder()

    async def process_spans(
        self, share: float, received: Mapping[str, int], timeout_s: float
    ) -> dict[str, SpanBatch]:
        batch = self.recorder.take(share, received.get("trainer", 0))
        await asyncio.sleep(timeout_s)
        return {"trainer": batch}


async def call_here(function: Callable[..., Any], *arguments: Any) -> Any:
    """As ``ActorSystem.run_blocking`` in virtual time."""
    return function(*arguments)


def test_the_end_waits_for_no_process_longer_than_two_seconds_and_has_all_spans(
    tmp_path: Path,
) -> None:
    async def main() -> float:
        supervision = FakeSupervision()
        log = SpanLog(tmp_path / "trace", TraceConfig(), print)
        keeper = SpanKeeper(
            cast(RunSupervision, cast(Any, supervision)), log, lambda: {"trainer": "here"}, call_here
        )
        supervision.recorder.add(1.0, 2.0, ("trainer", "optimizer", "", "", ""))
        running = asyncio.create_task(keeper.run())
        await asyncio.sleep(1.0)
        supervision.recorder.add(2.0, 3.0, ("trainer", "optimizer", "", "", ""))
        began = asyncio.get_running_loop().time()
        await keeper.end(print)
        seconds = asyncio.get_running_loop().time() - began
        await running
        log.close()
        return seconds

    assert virtual_time.run(main()) <= 2.0
    spans = StoredSpans(tmp_path / "trace")
    assert spans.refresh() and spans.size == 2


def test_an_error_at_the_end_is_said_and_hides_no_result(tmp_path: Path) -> None:
    class Broken(FakeSupervision):
        async def process_spans(
            self, share: float, received: Mapping[str, int], timeout_s: float
        ) -> dict[str, SpanBatch]:
            raise SystemClosed("it is closed")

    async def main() -> list[str]:
        said: list[str] = []
        log = SpanLog(tmp_path / "trace", TraceConfig(), print)
        keeper = SpanKeeper(cast(RunSupervision, cast(Any, Broken())), log, dict, call_here)
        await keeper.end(said.append)
        return said

    assert virtual_time.run(main()) == ["the last spans are not recorded: SystemClosed: it is closed"]
