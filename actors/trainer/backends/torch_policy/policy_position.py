"""A policy's position in its training: all of its state that is not a tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, PlainSerializer, TypeAdapter

from ....credit.credit_config import CreditConfig
from ....names import AgentName
from ...objective.role_baselines import RoleBaselines
from .held_samples import HeldSample, pack_held, read_held
from .step_totals import StepTotals

_Held = Annotated[list[HeldSample], PlainSerializer(pack_held), BeforeValidator(read_held)]


@dataclass(slots=True)
class PolicyPosition:
    """``version`` is the count of steps; ``totals`` and ``held`` (samples that wait for the step's end) are those of
    the present one. ``accumulated``: the gradient may be other than zero. ``sft_batches`` since
    the SFT began, 0 if it has ended; ``sft_loss`` of the last. ``non_finite_steps``: in a row, up to the last step.
    ``baselines``: of agents with running means.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    version: int = 0
    totals: StepTotals = field(default_factory=StepTotals)
    held: _Held = field(default_factory=list)
    accumulated: bool = False
    sft_batches: int = 0
    sft_loss: float = 0.0
    deviating_steps: int = 0
    non_finite_steps: int = 0
    baselines: RoleBaselines = field(default_factory=RoleBaselines)

    @classmethod
    def loaded(cls, version: int, role_means: dict[str, float]) -> "PolicyPosition":
        """The position after an optimizer step, from a policy's files."""
        return cls(version, baselines=RoleBaselines(role_means))

    def step(self, credit: Mapping[AgentName, CreditConfig]) -> None:
        """Counts an optimizer step and begins the next one. ``credit``: of the policy's agents."""
        self.version += 1
        self.baselines.step(credit)
        self.totals = StepTotals()
        self.accumulated = False

    def plain(self) -> dict[str, Any]:
        """Plain data for MessagePack, with ``held`` as bytes: see ``pack_held``."""
        data: dict[str, Any] = _POSITION.dump_python(self)
        return data


_POSITION = TypeAdapter(PolicyPosition)


def read_position(plain: dict[str, Any]) -> PolicyPosition:
    """The inverse of ``PolicyPosition.plain``. Raises ``ValueError`` for data of another kind."""
    return _POSITION.validate_python(plain)
