"""T13's checks of memory that grows and of memory that stays."""

from typing import Any

from scripts.gpu.long_run import CARD_LENGTH, check_steps


def metrics(growth_mib: float) -> list[dict[str, Any]]:
    """Thirty steps of two seconds; the trainer grows with each by that much, the card not at all."""
    figures = {
        f"{key}/{policy}": 0.1
        for key in ("backward_s", "optimizer_s", "publish_s", "pause_max_s")
        for policy in ("planner", "executor")
    }
    return [
        {
            **figures, "step": step, "time_s": 2.0 * step, "tokens": 100, "rollout_s": 1.0,
            "rss_mib/trainer": 1000 + growth_mib * step, "device_used_mib/GPU-1": 3000.0,
            "device_busy_percent/GPU-1": 40,
        }
        for step in range(1, 31)
    ]  # fmt: skip


def test_memory_that_grows_with_the_steps_fails() -> None:
    for growth_mib, passed in ((0.1, True), (10.0, False)):
        checks = {
            check.name.partition(" from")[0]: check for check in check_steps(metrics(growth_mib), CARD_LENGTH)
        }
        assert checks["growth of rss_mib/trainer"].passed is passed
        assert checks["growth of device_used_mib/GPU-1"].passed
        assert checks["trained tokens/s"].value == 50 and checks["rollout tokens/s"].value == 100
        assert checks["share of time computing, device_busy_percent/GPU-1"].value == 40
