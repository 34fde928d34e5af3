"""The form in which a trainer's log-probabilities travel into the run's file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.compared_logprobs import Compared, compared_of, pack_compared, unpack_compared
from flexmarl.actors.sample_id import SampleId

IDS = st.builds(
    SampleId, st.integers(0, 10**17), st.text(max_size=5), st.integers(0, 9), st.integers(0, 10**17)
)
VALUES = st.lists(st.floats(width=16, allow_nan=False), max_size=5)


@given(st.dictionaries(IDS, st.tuples(st.integers(0, 10**9), VALUES), max_size=9))
def test_each_sample_arrives_within_its_group(samples: dict[SampleId, tuple[int, list[float]]]) -> None:
    packed = pack_compared(
        {
            str(name): Compared(version, np.array(values, np.float16))
            for name, (version, values) in samples.items()
        }
    )
    found = {}
    for group in unpack_compared(packed):
        of_group = compared_of(group.content)
        assert len(of_group) == group.entries
        for (trajectory, turn), one in of_group.items():
            name = SampleId(group.step, group.query, turn, trajectory)
            found[name] = one.version, one.differences.tolist()
    assert found == samples


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91\x01"])
def test_damage_is_named(damage: bytes) -> None:
    with pytest.raises(ValueError, match="not a record of log-probabilities"):
        unpack_compared(damage)
    with pytest.raises(ValueError, match="log-probabilities are damaged"):
        compared_of(damage)


def test_a_difference_is_exact_to_a_two_thousandth_of_itself() -> None:
    exact = np.array([0.0, -3.21e-4, 0.0123456, 1.7, -250.0])
    (group,) = unpack_compared(pack_compared({"1:q_0_0": Compared(0, exact.astype(np.float16))}))
    found = compared_of(group.content)[0, 0].differences
    assert found == pytest.approx(exact, rel=2**-11)
