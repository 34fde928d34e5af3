"""Cause: all wait for new weights, from the end of the optimizer step until the instances have applied them."""

from collections.abc import Iterator

from ..formatting import duration
from .evidence import Evidence
from .finding import Finding


def slow_installs(evidence: Evidence) -> Iterator[Finding]:
    """The copy is the transport's, the rest of the pause is the engine's own work, which no setting shortens."""
    seconds = evidence.parts["publishing weights"]
    publish_s = {name: evidence.per_step("policy", name, "publish_s") for name in evidence.names("policy")}
    if not publish_s:
        return
    slowest = max(publish_s, key=lambda name: publish_s[name])
    copy_s, load_s = (evidence.per_step("policy", slowest, f"{part}_max_s") for part in ("transfer", "load"))
    yield Finding(
        "slow installs",
        seconds,
        f"new weights are {evidence.of_step(seconds)}: the slowest instance of {slowest} takes {duration(copy_s)} to "
        f"copy them and {duration(load_s)} to load them",
        "weights.path" if copy_s > load_s else "",
    )
