"""Cause: a step waits for the slowest trajectories of its groups, while instances have little to do."""

from collections import Counter
from collections.abc import Iterator
from statistics import fmean

from .evidence import Evidence
from .finding import Finding


def late_groups(evidence: Evidence) -> Iterator[Finding]:
    """By the end of the rollouts in which each open group lacks one trajectory. Under ``async`` other steps fill it."""
    tails = evidence.of_steps("tail_s")
    queries = Counter(step.last_query for step in evidence.steps if step.last_query)
    if evidence.mode == "async" or not tails or not queries:
        return
    seconds = fmean(tails)
    (query, often), *_ = queries.most_common(1)
    steps = f"{often} of {len(evidence.steps)} steps"
    last = f"{evidence.steps[-1].last_query} in the newest step" if often == 1 else f"{query} in {steps}"
    yield Finding(
        "late groups",
        seconds,
        f"rollouts end with {evidence.of_step(seconds)} in which each open group waits for its slowest trajectory, at "
        f"last {last}{_lengths(evidence)}; with one trajectory more, a group closes without it",
        "rollout.extra_trajectories",
    )


def _lengths(evidence: Evidence) -> str:
    """The agent whose turns differ most in length, as the rest of a sentence."""
    lengths = {
        agent: tuple(evidence.values("agent", agent, f"turn_tokens_{name}") for name in ("p50", "max"))
        for agent in evidence.names("agent")
    }
    means = {agent: (fmean(half), fmean(most)) for agent, (half, most) in lengths.items() if half and most}
    if not means:
        return ""
    agent = max(means, key=lambda agent: means[agent][1] - means[agent][0])
    half, most = means[agent]
    return f"; half of the turns of {agent} have at most {half:.3g} tokens, the longest {most:.3g}"
