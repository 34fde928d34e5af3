"""The constructor's argument of every instance."""

from dataclasses import dataclass, field

from ...core.ref import ActorRef
from ...core.supervision.node import NODE_DIRECTORY
from ..messages import ModelConfig, RouterApi, WeightsConfig
from ..names import PolicyName
from .inference_config import EngineConfig


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The model under an adapter that an instance gets alone. ``seed``: of its weights, if they are random.
    ``most_rank``: the largest of all adapters over it. ``adapters``: that an instance serves at the same time."""

    seed: int
    most_rank: int
    adapters: int = 1


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The model of a policy, None if it is simulated, and the engine that generates with it. ``base``: of a LoRA policy
    whose instances get the adapter alone. ``drops_routes``: the experts of its turns are not sent, also if its engine
    records them."""

    model: ModelConfig | None
    engine: EngineConfig
    base: ServedBase | None = None
    drops_routes: bool = False


@dataclass(frozen=True, slots=True)
class InstanceSetup:
    """``policy``: the policy that the instance is made for. ``policies``: all that it may serve, ``policy`` among them.
    ``router``: the one that it joins; None if it is called by others alone. ``beside``: policies that it serves at the
    same time as ``policy``: adapters over one base. ``encrypted``: bulk between hosts is encrypted."""

    policy: PolicyName
    policies: dict[PolicyName, ServedPolicy]
    router: ActorRef[RouterApi] | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    beside: tuple[PolicyName, ...] = ()
    encrypted: bool = True

    @property
    def devices(self) -> list[str]:
        """The devices of the policies' models, by PyTorch's names; empty if they are simulated."""
        return [served.model.device for served in self.policies.values() if served.model is not None]

    def environment(self) -> dict[str, str]:
        """The environment variables that the process of the instance needs, for the engines of all its policies.

        Temporary files are in the node's directory: those of an engine that was killed end with the run."""
        variables = {"TMPDIR": NODE_DIRECTORY}
        for served in self.policies.values():
            if served.model is not None:
                variables |= served.engine.environment(served.model.device)
        return variables
