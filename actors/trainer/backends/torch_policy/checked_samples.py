"""The samples of a micro-batch, checked before the first forward, each with its advantage."""

from collections.abc import Sequence

from ....errors import StaleSample
from ....messages import Sample
from ....names import AgentName, PolicyName
from ...objective.role_baselines import RoleBaselines
from ...objective.transforms import advantage_of_sample
from ...trainer_setup import PolicySetup
from .forward_batches import TrainedSample


def checked_samples(
    batch: Sequence[Sample],
    policy: PolicyName,
    setup: PolicySetup,
    version: int,
    baselines: RoleBaselines,
) -> list[TrainedSample]:
    """Every sample with its advantage as it comes (``advantage_of_sample``), for ``policy`` at ``version``.

    Raises as ``PolicyBackend.accumulate`` does, but for tokens outside the vocabulary.
    """
    transforms = setup.loss.transforms
    checked = []
    for sample in batch:
        if not 0 <= version - sample.policy_version <= setup.max_staleness:
            raise StaleSample(sample.sample_id, sample.policy_version, policy, version)
        if not len(sample.tokens) == len(sample.logprobs) > 0:
            counts = f"{len(sample.tokens)} tokens, {len(sample.logprobs)} log-probabilities"
            raise ValueError(f"sample {sample.sample_id}: {counts}; need as many of each, and one at least")
        if not sample.temperature > 0:
            raise ValueError(
                f"sample {sample.sample_id}: drawn at temperature {sample.temperature}, which has no "
                "log-probabilities to train on"
            )
        credit = setup.credit.get(AgentName(sample.agent))
        if credit is None:
            users = ", ".join(setup.credit)
            raise ValueError(
                f"sample {sample.sample_id}: agent {sample.agent} does not use policy {policy}; {users} do"
            )
        role_mean = baselines.mean(credit, sample.agent)
        checked.append(TrainedSample(sample, advantage_of_sample(transforms, sample.advantage, role_mean)))
    return checked
