"""The pauses between looks for the end of a command at a server that other workers share."""

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.environments.sandboxes.rex_sandbox import pause_s


def looks(command_s: float) -> tuple[int, float]:
    """The looks for the end of a command, and the seconds by which the last one is late, if none takes any time."""
    count, elapsed_s = 0, 0.0
    while elapsed_s < command_s:
        elapsed_s += pause_s(elapsed_s)
        count += 1
    return count, elapsed_s - command_s


def test_a_long_command_costs_its_server_few_looks() -> None:
    assert looks(1.9)[0] == 10
    assert looks(10.0)[0] < 30
    assert looks(600.0)[0] < 350, "a look every half second would be 1200"


@given(st.floats(0.0, 3600.0))
def test_an_end_is_seen_late_by_a_tenth_of_the_command_or_little(command_s: float) -> None:
    assert looks(command_s)[1] <= min(max(0.2, command_s / 10), 2.0) + 1e-6
