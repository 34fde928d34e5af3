"""Records of a run's metrics."""

import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

FINITE = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)


def record(step: int, agents: Sequence[str] = ("sorter", "checker"), **more: Any) -> dict[str, Any]:
    line: dict[str, Any] = {
        "step": step,
        "time_s": 0.07 * step,
        "step_s": 0.07,
        "versions": dict.fromkeys(agents, step),
        "generated_by": dict.fromkeys(agents, step - 1),
        "tokens": 1024,
        "tokens_per_s": 14400.0,
        "overlap_s": 0.012,
        "rollout_s": 0.05,
        "failed_trajectories": 0,
        "stale_samples": 0,
        "loop_lag_ms/store": 0.4,
        "rss_mib/store": 350.0 + step,
    }
    for agent in agents:
        line |= {
            f"reward/{agent}": 0.5 + 0.4 * math.sin(step / 50),
            f"backward_s/{agent}": 0.013,
            f"optimizer_s/{agent}": 0.001,
            f"publish_s/{agent}": 0.002,
            f"loss/{agent}": 0.01,
            f"grad_norm/{agent}": 0.4,
            f"samples/{agent}": 128,
            f"nonzero_advantage_share/{agent}": 0.7,
        }
    return line | more
