import pytest

from flexmarl.launch.bench.call_goals import GOALS
from flexmarl.launch.bench.goals import judge

_MET = {
    "call_p50_us": 149.0, "bare_p50_us": 100.0, "call_p99_us": 199.0, "bare_p99_us": 100.0,
    "dict_p50_us": 149.0, "bare_dict_p50_us": 100.0, "dict_p99_us": 199.0, "bare_dict_p99_us": 100.0,
    "calls_per_s": 101e3, "bare_calls_per_s": 400e3, "oneway_per_s": 601e3, "fan_in_calls_per_s": 171e3,
    "best_bare_p50_us": 120.0, "gathered_calls_per_s": 201e3, "best_bare_calls_per_s": 570e3,
    "gathered_1k_calls_per_s": 61e3,
    "array_gb_s": 0.91, "bare_array_gb_s": 1.0,
    "spawn_first_reply_s": 0.79, "idle_rss_mib": 59.0, "idle_cpu_percent": 0.0, "kill_to_dead_ms": 20.0,
}  # fmt: skip


@pytest.mark.parametrize("transport", GOALS)
def test_goals_are_met(transport: str) -> None:
    assert [verdict.key for verdict in judge(GOALS[transport], _MET) if not verdict.met] == []


@pytest.mark.parametrize(
    ("transport", "key", "value", "goal"),
    [
        ("ipc", "call_p50_us", 151, "<= 1.5x bare"),
        ("ipc", "dict_p50_us", 151, "<= 1.5x bare"),
        ("tcp_curve", "call_p50_us", 201, "<= 2x bare"),
        ("tcp_curve", "dict_p99_us", 201, "<= 2x bare"),
        ("ipc", "call_p99_us", 201, "<= 2x bare"),
        ("ipc", "calls_per_s", 99.9e3, ">= 100,000"),
        ("tcp_curve", "bare_calls_per_s", 405e3, ">= 0.25x bare"),
        ("ipc", "best_bare_p50_us", 119, "<= 1.25x best bare"),
        ("tcp_curve", "best_bare_p50_us", 95, "<= 1.5625x best bare"),
        ("ipc", "gathered_calls_per_s", 199e3, ">= 200,000"),
        ("ipc", "best_bare_calls_per_s", 575e3, ">= 0.35x best bare"),
        ("tcp_curve", "gathered_calls_per_s", 159e3, ">= 160,000"),
        ("tcp_curve", "best_bare_calls_per_s", 720e3, ">= 0.28x best bare"),
        ("ipc", "gathered_1k_calls_per_s", 59e3, ">= 60,000"),
        ("tcp_curve", "gathered_1k_calls_per_s", 47e3, ">= 48,000"),
        ("ipc", "oneway_per_s", 599e3, ">= 600,000"),
        ("tcp_curve", "oneway_per_s", 479e3, ">= 480,000"),
        ("ipc", "fan_in_calls_per_s", 169e3, ">= 170,000"),
        ("tcp_curve", "fan_in_calls_per_s", 135e3, ">= 136,000"),
        ("ipc", "array_gb_s", 0.89, ">= 0.9x bare"),
        ("ipc", "spawn_first_reply_s", 0.81, "<= 0.8"),
        ("ipc", "idle_rss_mib", 61, "<= 60"),
        ("ipc", "idle_cpu_percent", 0.6, "<= 0.5"),
    ],
)
def test_goals_are_missed(transport: str, key: str, value: float, goal: str) -> None:
    verdicts = judge(GOALS[transport], {**_MET, key: value})
    assert goal in [verdict.goal for verdict in verdicts if not verdict.met]


def test_over_tcp_there_is_no_absolute_goal_for_calls_in_flight() -> None:
    assert all(
        verdict.met
        for verdict in judge(GOALS["tcp_curve"], {**_MET, "calls_per_s": 50e3, "bare_calls_per_s": 1e5})
    )
