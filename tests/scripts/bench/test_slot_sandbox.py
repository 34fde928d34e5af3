"""``scripts/bench/run slots sandbox``: real commands at a real server, none of which is left."""

from scripts.bench import slot_sandbox
from scripts.bench.slot_sandbox import Options, measure, show

from ...bench_tables import drawn
from ...launch.conftest import wait_until


def test_commands_take_at_least_their_time_and_leave_nothing() -> None:
    options = Options(rounds=1, commands=1, short_s=0.1, long_s=0.2)
    result = measure(options, lambda part: None)
    for key in ("short_s", "beside_1_s", "beside_3_s", "beside_7_s"):
        assert result[key] > options.short_s
    assert result["bare_s"] > 0 and result["late_s"] > 0
    assert "beside_7" in drawn(show, result)
    wait_until(lambda: not slot_sandbox._sleepers(), "the end of the other workers' commands")
