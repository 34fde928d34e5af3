"""The checks of a run under faults: each is a function that returns its problem as a line, or None. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ....actors.sample_id import SampleId
from ....core.errors import Deadlock, VirtualTimeExceeded
from ...errors import LeftBehind
from .outcome import Outcome

_NO_CAUSE: Final = "no actor names a wait"
_CUT: Final = "the link between their hosts is cut"
_MOST_NAMES: Final = 5


@dataclass(frozen=True, slots=True)
class Problem:
    """``check``: a key of ``CHECKS``."""

    check: str
    text: str


def problems_of(outcome: Outcome) -> list[Problem]:
    """Those of all checks, in the order of the table."""
    return [Problem(name, text) for name, check in CHECKS.items() if (text := check(outcome)) is not None]


def end_problem(outcome: Outcome) -> str | None:
    """A run ends by itself, after its last step. One that does not has at least named its wait, which is added. Behind
    a link that stays cut it may also end by the router's error, which names the link."""
    error = outcome.error
    if outcome.stays_cut and _CUT in str(error):
        return None
    if isinstance(error, Deadlock | VirtualTimeExceeded):
        causes = [cause for event in outcome.events if "causes" in event for cause in event["causes"]]
        return f"it did not end ({error}); it said: {causes[-1] if causes else 'nothing'}"
    if error is not None and not isinstance(error, LeftBehind):
        return f"it failed: {type(error).__name__}: {error}"
    return None


def unnamed_wait_problem(outcome: Outcome) -> str | None:
    """A run that stands still says what it waits for."""
    for event in outcome.events:
        if event["event"] == "run_stalled" and all(_NO_CAUSE in cause for cause in event["causes"]):
            return f"it stood still for {event['seconds']:g} s after step {event['step']}, and named nothing"
    return None


def remains_problem(outcome: Outcome) -> str | None:
    """Nothing of a run is left after its end."""
    return str(outcome.error) if isinstance(outcome.error, LeftBehind) else None


def repeated_problem(outcome: Outcome) -> str | None:
    """A sample is trained once, also if its step was trained before in an attempt that was lost."""
    for name, policy in outcome.saved.items():
        counts = Counter(sample for samples in policy.trained.values() for sample in samples)
        if repeated := [sample for sample, count in counts.items() if count > 1]:
            return f"policy {name} has trained more than once: {_names(repeated)}"
    return None


def missing_problem(outcome: Outcome) -> str | None:
    """All samples that the run without faults trains are trained, and no others."""
    for name, policy in outcome.saved.items():
        trained = {sample for samples in policy.trained.values() for sample in samples}
        versions = outcome.expected[name].trained if name in outcome.expected else {}
        expected = {
            sample for version, samples in versions.items() if version in policy.trained for sample in samples
        }
        if missing := sorted(expected - trained):
            return f"policy {name} has not trained {_names(missing)}"
        if further := sorted(trained - expected):
            return f"policy {name} has trained others than without faults: {_names(further)}"
    return None


def version_problem(outcome: Outcome) -> str | None:
    """A policy has as many versions as optimizer steps; the last checkpoint of a whole run has all of them; each has
    the number of samples that it has without faults, and they are of its own step, or within the staleness."""
    for name, policy in outcome.saved.items():
        versions = sorted(policy.trained)
        if versions != [*range(policy.version)]:
            return f"policy {name} has version {policy.version}, and the steps {versions}"
        if outcome.error is None and policy.version != outcome.steps:
            return f"policy {name} ended with version {policy.version} of {outcome.steps}"
        expected = outcome.expected[name].trained if name in outcome.expected else policy.trained
        for version, samples in policy.trained.items():
            if len(samples) != (count := len(expected.get(version, ()))):
                return f"policy {name} has changed version {version} by {len(samples)} samples instead of {count}"
            if wrong := [sample for sample in samples if _age(sample, version) > outcome.staleness]:
                return (
                    f"policy {name} has changed version {version} by samples of other steps: {_names(wrong)}"
                )
    return None


def _age(sample: str, version: int) -> int:
    """Steps between a sample's own and the one that has trained it, whose number is one more than its version's."""
    step = SampleId.parse(sample).step
    assert step is not None, "evaluations are not trained"
    return abs(step - 1 - version)


def sum_problem(outcome: Outcome) -> str | None:
    """The sums of all gradients are those of the run without faults, bit by bit. With stale samples time decides which
    of them are trained together, and in a run that failed there is no checkpoint to compare with."""
    if outcome.staleness:
        return None
    for name, policy in outcome.saved.items():
        expected = outcome.expected.get(name)
        if expected is None or policy.version != expected.version:
            continue
        if policy.digest != expected.digest:
            return f"policy {name} has other sums of gradients than without faults: its samples have other contents"
    return None


def lost_write_problem(outcome: Outcome) -> str | None:
    """The store's journal has all that the store has acknowledged."""
    if outcome.lost_writes:
        return f"the store's journal lacks what was acknowledged: {_names(outcome.lost_writes)}"
    return None


def early_checkpoint_problem(outcome: Outcome) -> str | None:
    """A policy is saved for a checkpoint only when the store has the commit of its last step."""
    if outcome.early_checkpoints:
        return f"a policy was saved too early: {_names(outcome.early_checkpoints)}"
    return None


def checkpoint_problem(outcome: Outcome) -> str | None:
    """The newest checkpoint is whole, and a run that has ended has one. One that was reported as saved is there in
    later attempts: no step before it is saved again."""
    if outcome.damage:
        return outcome.damage
    if outcome.error is None and not outcome.saved:
        return "it ended without a checkpoint"
    newest = 0
    for event in outcome.events:
        if event["event"] == "checkpoint_saved":
            if event["step"] <= newest:
                return f"step {event['step']} was saved after step {newest}"
            newest = event["step"]
    return None


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


CHECKS: Final[Mapping[str, Callable[[Outcome], str | None]]] = {
    "ends": end_problem,
    "names its waits": unnamed_wait_problem,
    "leaves nothing": remains_problem,
    "trains once": repeated_problem,
    "trains all": missing_problem,
    "has all versions": version_problem,
    "has equal sums": sum_problem,
    "loses no write": lost_write_problem,
    "commits before checkpoints": early_checkpoint_problem,
    "keeps checkpoints": checkpoint_problem,
}
