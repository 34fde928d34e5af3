"""Plans of transfers that several members join: complete, without a wait in a circle, in steps."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.transport.errors import StateMismatch
from flexmarl.transport.groups.plan import RowRange, Shards, Step, make_plan, whole
from flexmarl.transport.handle import TensorSpec

SPECS = (
    TensorSpec("a", (8, 4), "float32", 0),
    TensorSpec("b", (5,), "int8", 128),
    TensorSpec("scalar", (), "float64", 192),
    TensorSpec("empty", (0, 3), "float32", 256),
)


def split(ranks: int, specs: Sequence[TensorSpec] = SPECS) -> Shards:
    """As FSDP2 shards them: even parts of dimension 0, the last ones smaller or empty."""
    shards: dict[str, dict[str, tuple[int, int]]] = {f"rank{n}": {} for n in range(ranks)}
    for name, (_, rows) in whole(specs).items():
        part = -(-rows // ranks)
        for n in range(ranks):
            shards[f"rank{n}"][name] = (min(n * part, rows), min((n + 1) * part, rows))
    return shards


def test_a_broadcast_sends_every_tensor_once_to_all() -> None:
    everything = whole(SPECS)
    plan = make_plan("key", SPECS, {"trainer": everything}, {"e1": everything, "e0": everything})
    (step,) = plan.steps
    assert (step.sender, step.receivers, step.size_bytes) == ("trainer", ("e0", "e1"), 128 + 5 + 8)
    assert step.row_ranges == (RowRange("a", 0, 8), RowRange("b", 0, 5), RowRange("scalar", 0, 1))


def test_shards_are_sent_by_those_that_have_them() -> None:
    plan = make_plan("key", SPECS[:1], split(2, SPECS[:1]), {"engine": {"a": (0, 8)}})
    assert [(step.sender, step.row_ranges) for step in plan.steps] == [
        ("rank0", (RowRange("a", 0, 4),)),
        ("rank1", (RowRange("a", 4, 8),)),
    ]


def test_what_a_member_has_is_not_sent_to_it() -> None:
    plan = make_plan("key", SPECS[:1], split(2, SPECS[:1]), {"rank0": {"a": (2, 6)}})
    (step,) = plan.steps
    assert (step.sender, step.receivers, step.row_ranges) == ("rank1", ("rank0",), (RowRange("a", 4, 6),))
    assert plan.local_rows == {"rank0": (RowRange("a", 2, 4),)}


def test_equal_members_share_the_sending() -> None:
    held = {"x": whole(SPECS), "y": whole(SPECS)}
    plan = make_plan("key", SPECS, held, {"z": whole(SPECS)})
    assert {step.sender for step in plan.steps} == {"x", "y"}


members = st.integers(1, 4)
ranges = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda pair: (min(pair), max(pair)))


@given(
    trainers=members,
    wanted=st.dictionaries(
        st.sampled_from(["e0", "e1", "rank0", "rank1"]),
        st.fixed_dictionaries(
            {}, optional={"a": ranges, "scalar": st.just((0, 1)), "empty": st.just((0, 0))}
        ),
        max_size=4,
    ),
    step_bytes=st.integers(1, 200),
)
def test_every_member_gets_exactly_the_rows_that_it_wants(
    trainers: int, wanted: dict[str, dict[str, tuple[int, int]]], step_bytes: int
) -> None:
    held = split(trainers)
    plan = make_plan("key", SPECS, held, wanted, step_bytes)
    assert plan == make_plan("key", SPECS, dict(reversed(list(held.items()))), wanted, step_bytes)
    sizes = {spec.name: spec.size_bytes // max(1, (spec.shape or (1,))[0]) for spec in SPECS}
    for number, step in enumerate(plan.steps):
        assert step.number == number and step.sender not in step.receivers
        rows = [(row_range.stop - row_range.start) * sizes[row_range.tensor] for row_range in step.row_ranges]
        assert sum(rows) == step.size_bytes
        assert step.size_bytes <= step_bytes or len(step.row_ranges) == 1
        for row_range in step.row_ranges:
            start, stop = held[step.sender][row_range.tensor]
            assert start <= row_range.start < row_range.stop <= stop
    for member, rows_wanted in wanted.items():
        got = [*plan.local_rows[member], *_received(plan.steps, member)]
        for name, (start, stop) in rows_wanted.items():
            mine = sorted((row_range.start, row_range.stop) for row_range in got if row_range.tensor == name)
            assert all(one[1] == other[0] for one, other in pairwise(mine))
            assert (mine[0][0], mine[-1][1]) == (start, stop) if mine else start == stop
        assert {row_range.tensor for row_range in got} <= rows_wanted.keys()


def _received(steps: tuple[Step, ...], member: str) -> list[RowRange]:
    return [row_range for step in steps if member in step.receivers for row_range in step.row_ranges]


def test_rows_that_nobody_has_and_wrong_names_are_refused() -> None:
    with pytest.raises(StateMismatch, match="a: no member has rows 4 to 8"):
        make_plan("key", SPECS, {"x": {"a": (0, 4)}}, {"y": {"a": (0, 8)}})
    with pytest.raises(StateMismatch, match=r"a: no rows 0 to 9 \(y\)"):
        make_plan("key", SPECS, {"x": whole(SPECS)}, {"y": {"a": (0, 9)}})
    with pytest.raises(StateMismatch, match=r"missing: not in the state \(x\)"):
        make_plan("key", SPECS, {"x": {"missing": (0, 4)}}, {})
