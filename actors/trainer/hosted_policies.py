"""The policies that one process computes with: their backends, tokenizers and supervised examples.

Every method but the constructor computes, and is to be called within ``computations.run``.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...core.collector import importing
from ...transport.handle import TensorSpec
from ..messages import GangPlace, Sample, StepStats
from ..names import AgentName, PolicyName, Step
from ..recipe import Recipe
from .backends.backend_config import SimulatedTrainerConfig
from .backends.backend_factory import BackendFactory
from .backends.policy_backend import MicroBatchStats, PolicyBackend
from .computations import Computations
from .trainer_setup import TrainerSetup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .backends.torch_policy.gang_rank import GangRank

ALONE: Final = GangPlace(0, 1, "")


class HostedPolicies:
    def __init__(self, setup: TrainerSetup) -> None:
        """Raises RecipeError if the recipe can't be loaded."""
        self.factory = factory_of(setup)
        self._setup = setup
        self._recipe = Recipe(setup.recipe)
        self.computations = Computations(self.factory, setup.compute_timeout_s, self._recipe.folder)
        self._hosted: dict[PolicyName, PolicyBackend] = {}
        self._tokenizers: dict[PolicyName, PreTrainedTokenizerBase] = {}
        self._gangs: dict[PolicyName, ExitStack] = {}

    def __contains__(self, policy: PolicyName) -> bool:
        return policy in self._hosted

    def __getitem__(self, policy: PolicyName) -> PolicyBackend:
        return self._hosted[policy]

    def build(self, policy: PolicyName, place: GangPlace = ALONE) -> PolicyBackend:
        """The policy as it begins the run. Raises CheckpointIncomplete, CheckpointMismatch."""
        setup = self._setup.policies[policy]
        backend = self.factory.build(policy, setup, self._joined(policy, place))
        self._tokenizers[policy] = self.factory.tokenizer(setup)
        if self._setup.resume_from is not None:
            backend.load(self._setup.resume_from / policy)
        elif setup.init_from is not None:
            backend.start_from(setup.init_from)
        self._hosted[policy] = backend
        return backend

    def memory(self, policy: PolicyName, tensors: Iterable[TensorSpec]) -> dict[str, Any]:
        """See ``BackendFactory.memory``."""
        return self.factory.memory(self._setup.policies[policy], tensors)

    def host(
        self, policy: PolicyName, place: GangPlace = ALONE, memory: dict[str, Any] | None = None
    ) -> PolicyBackend:
        """The policy, to have a state loaded before anything else. ``memory``: see ``BackendFactory.host``."""
        setup = self._setup.policies[policy]
        gang = self._joined(policy, place)
        backend = self._hosted[policy] = self.factory.host(policy, setup, gang, memory)
        if policy not in self._tokenizers:
            self._tokenizers[policy] = self.factory.tokenizer(setup)
        return backend

    def _joined(self, policy: PolicyName, place: GangPlace) -> "GangRank | None":
        """This process in the policy's gang, until the policy is released."""
        if place.size == 1:
            return None
        gang = self.factory.joined(self._setup.policies[policy], place.rank, place.size, Path(place.meeting))
        self._gangs[policy] = ExitStack()
        return self._gangs[policy].enter_context(gang)

    def release(self, policy: PolicyName) -> None:
        """Hosts the policy no more, also if ``build`` or ``host`` has failed."""
        if (backend := self._hosted.pop(policy, None)) is not None:
            self.factory.release(backend)
            del backend
        if (gang := self._gangs.pop(policy, None)) is not None:
            gang.close()

    def sft(self, policy: PolicyName, first_batch: int, count: int) -> float:
        """See ``TrainerApi.sft``."""
        setup, tokenizer = self._setup.policies[policy], self._tokenizers[policy]
        loss = 0.0
        for batch in range(first_batch, first_batch + count):
            shares = sft_shares(tuple(setup.credit), setup.sft.batch_size, batch)
            examples = [
                example for agent, size in shares.items() for example in self._recipe.sft(agent, batch, size)
            ]
            loss = self._hosted[policy].sft(
                [
                    (
                        tuple(tokenizer(prompt).input_ids),
                        (*tokenizer(completion, add_special_tokens=False).input_ids, tokenizer.eos_token_id),
                    )
                    for prompt, completion in examples
                ]
            )
        return loss

    def accumulate(self, policy: PolicyName, samples: Sequence[Sample]) -> MicroBatchStats:
        return self._hosted[policy].accumulate(samples)

    def optimizer_step(self, policy: PolicyName, step: Step) -> StepStats:
        """Step ``step`` of the run, from 1."""
        return self._hosted[policy].optimizer_step(step - 1)

    def weights(self, policy: PolicyName) -> Mapping[str, Any]:
        """See ``PolicyBackend.weights``. Casting a whole model takes long."""
        return self._hosted[policy].weights()

    def save(self, policy: PolicyName, folder: Path) -> None:
        self._hosted[policy].save(folder, self._tokenizers[policy])


def factory_of(setup: TrainerSetup) -> BackendFactory:
    """The backends of the kind that the setup's policies, all of one kind, name."""
    # Imported here, so that a simulated trainer does not import transformers: that takes seconds.
    if all(isinstance(policy.trainer, SimulatedTrainerConfig) for policy in setup.policies.values()):
        from .backends.simulated_factory import SimulatedFactory

        return SimulatedFactory(setup.recipe.seed)
    with importing():
        from .backends.torch_policy.torch_factory import TorchFactory

    return TorchFactory(setup.recipe.seed, setup.total_steps)


def sft_shares(agents: Sequence[AgentName], size: int, batch: int) -> dict[AgentName, int]:
    """Examples of each agent in a supervised batch of ``size``: equal shares, agents without an example left out.

    Examples that are left over go to one agent each, to others in the next batch, so that over the batches all agents
    have as many.
    """
    share, left_over = divmod(size, len(agents))
    first = batch * left_over
    counts = {
        agent: share + ((number - first) % len(agents) < left_over) for number, agent in enumerate(agents)
    }
    return {agent: count for agent, count in counts.items() if count}
