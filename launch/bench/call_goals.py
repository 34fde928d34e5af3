"""Goals of the figures of ``flexmarl bench calls``."""

from .goals import Goal

_OTHER = (
    Goal("calls_per_s", "calls/s, many in flight", 0.25, at_most=False, bare="bare_calls_per_s"),
    Goal("array_gb_s", "array, GB/s", 0.9, at_most=False, bare="bare_array_gb_s"),
    Goal("spawn_first_reply_s", "spawn to first reply, s", 0.8, at_most=True),
    Goal("idle_rss_mib", "idle process, MiB", 60, at_most=True),
    # The kernel counts CPU time in ticks of 10 ms: the least that can be measured is one tick in two seconds.
    Goal("idle_cpu_percent", "idle process, % CPU", 0.5, at_most=True),
    Goal("kill_to_dead_ms", "kill -9 to ActorDead, ms", 50, at_most=True),
)


def _latency(p50_bound: float) -> tuple[Goal, ...]:
    return (
        Goal("call_p50_us", "empty call, p50, us", p50_bound, at_most=True, bare="bare_p50_us"),
        Goal("call_p99_us", "empty call, p99, us", 2, at_most=True, bare="bare_p99_us"),
        Goal("dict_p50_us", "1 KiB dict, p50, us", p50_bound, at_most=True, bare="bare_dict_p50_us"),
        Goal("dict_p99_us", "1 KiB dict, p99, us", 2, at_most=True, bare="bare_dict_p99_us"),
    )


def _load(share: float) -> tuple[Goal, ...]:
    """``share``: of the figures over ipc, for which the bounds are."""

    def rate(key: str, words: str, bound: float) -> Goal:
        return Goal(key, words, bound * share, at_most=False)

    best = {"bare_words": "best bare"}
    return (
        Goal("call_p50_us", "empty call, p50, us", 1.25 / share, at_most=True, bare="best_bare_p50_us", **best),
        rate("gathered_calls_per_s", "gathered calls/s", 200_000),
        Goal(
            "gathered_calls_per_s", "gathered calls/s", 0.35 * share, at_most=False,
            bare="best_bare_calls_per_s", **best,
        ),
        rate("gathered_1k_calls_per_s", "gathered calls/s, 1 KiB dict", 60_000),
        rate("oneway_per_s", "one-way messages/s", 600_000),
        rate("fan_in_calls_per_s", "calls/s, many callers", 170_000),
    )  # fmt: skip


# Encryption may add half a call's time; calls per second have a goal over ipc only.
_CALLS_OVER_IPC = Goal("calls_per_s", "calls/s, many in flight", 100_000, at_most=False)

GOALS: dict[str, tuple[Goal, ...]] = {
    "ipc": (*_latency(1.5), *_load(1.0), _CALLS_OVER_IPC, *_OTHER),
    "tcp_curve": (*_latency(2), *_load(0.8), *_OTHER),
}
