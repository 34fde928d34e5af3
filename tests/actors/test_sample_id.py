"""A sample's id and its trajectory's name: exact in both directions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.errors import StoreError
from flexmarl.actors.sample_id import SampleId, TrajectoryName

NUMBERS = st.integers(0, 10**18 - 1)
STEPS = st.none() | NUMBERS
# Whatever a data set calls its queries, the separators and digits above all.
QUERIES = st.text(alphabet=st.sampled_from("q:_0123-é \n")) | st.text()


@given(STEPS, QUERIES, NUMBERS, NUMBERS)
def test_what_is_formatted_is_parsed_to_the_same(
    step: int | None, query: str, turn: int, trajectory: int
) -> None:
    sample = SampleId(step, query, turn, trajectory)
    assert SampleId.parse(str(sample)) == sample
    assert TrajectoryName.parse(str(sample.trajectory_name)) == (step, query, trajectory)


@given(st.text(alphabet=st.sampled_from("1:_0eval٣+ \n"), max_size=20))
def test_what_is_parsed_is_formatted_to_the_same(text: str) -> None:
    for parse in (SampleId.parse, TrajectoryName.parse):
        try:
            parsed = parse(text)
        except StoreError:
            continue
        assert str(parsed) == text


def test_the_parts_are_named() -> None:
    sample = SampleId.parse("12:a_b:c_0_3_7")
    assert sample == SampleId(step=12, query="a_b:c_0", turn=3, trajectory=7)
    assert sample.group == "12:a_b:c_0"
    assert str(sample.trajectory_name) == "12:a_b:c_0_7"
    assert SampleId.parse("eval:q_0_0").step is None


@pytest.mark.parametrize(
    "text",
    ["", "q_0_0", "1:q_0", "1:q_0_01", "01:q_0_0", "1:q_0_-1", "1:q_0_1_", "1:q_0_٣", "1:q_0_" + "1" * 19],
)
def test_what_is_no_sample_id_is_refused(text: str) -> None:
    with pytest.raises(StoreError, match="is not a sample id"):
        SampleId.parse(text)
