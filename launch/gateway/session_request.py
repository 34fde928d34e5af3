"""The bodies of a service's requests, checked. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from ...actors.gateway.model_call import ApiError
from ...actors.messages import Query, SessionRewards, SessionTerms, SessionTurnReward
from .gateway_config import GatewayConfig

MOST_ORDER_BYTES: Final = 1 << 20

_DEEPEST: Final = 16

Rule = Literal["all", "main"]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


def _check_plain(value: Any, depth: int = 0) -> Any:
    """Raises ValueError for what no message between actors may have."""
    if depth > _DEEPEST:
        raise ValueError(f"is nested deeper than {_DEEPEST} levels")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("has a whole number beyond 64 bits")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_plain(inner, depth + 1)
    return value


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SessionRequest(_Body):
    """The body of ``POST /sessions``. ``models``: further names of agents. ``metadata`` and ``text`` are kept with the
    trajectory. ``train``: the turns that are trained, of all agents or by agent. ``lives_s``: seconds until the session
    expires."""

    models: dict[str, str] = Field(default_factory=dict, max_length=100)
    metadata: Annotated[dict[str, JsonValue], AfterValidator(_check_plain)] = Field(default_factory=dict)
    text: str = ""
    train: Rule | dict[str, Rule] = "all"
    lives_s: Annotated[_Finite, Field(gt=0)] | None = None

    def checked(self, name: str, agents: Sequence[str], config: GatewayConfig) -> tuple[Query, SessionTerms]:
        """The query of the session, and its terms. Raises ApiError."""
        for model, agent in self.models.items():
            if agent not in agents:
                problem = f"models: {model!r} is agent {agent!r}; there is: {', '.join(agents)}"
                raise ApiError(422, problem, parameter="models")
        rules = self.train if isinstance(self.train, dict) else dict.fromkeys(agents, self.train)
        for agent in rules:
            if agent not in agents:
                problem = f"train: there is no agent {agent!r}; there is: {', '.join(agents)}"
                raise ApiError(422, problem, parameter="train")
        lives_s = config.session_s if self.lives_s is None else self.lives_s
        if lives_s > config.session_s:
            problem = f"lives_s={lives_s:g} is more than gateway.session_s={config.session_s:g}"
            raise ApiError(422, problem, parameter="lives_s")
        data: dict[str, Any] = {"metadata": self.metadata} if self.metadata else {}
        if self.models:
            data["models"] = self.models
        return Query(name, self.text, data), SessionTerms(self.models, lives_s, rules)


class _TurnReward(_Body):
    turn: int | str
    reward: _Finite


class RewardsRequest(_Body):
    """The body of ``POST /sessions/{id}/rewards``."""

    agents: dict[str, _Finite] = Field(default_factory=dict)
    team: _Finite | None = None
    turns: list[_TurnReward] = Field(default_factory=list)
    metrics: dict[str, _Finite] = Field(default_factory=dict)

    def rewards(self) -> SessionRewards:
        """Raises ApiError for none at all."""
        if not self.agents and not self.turns and self.team is None:
            problem = "no rewards: give agents, team or turns; DELETE ends a session without rewards"
            raise ApiError(422, problem)
        turns = [SessionTurnReward(turn.turn, turn.reward) for turn in self.turns]
        return SessionRewards(self.agents, self.team, turns, self.metrics)


def read_body(kind: type[BaseModel], content: bytes) -> Any:
    """Raises ApiError, which names the key at fault."""
    try:
        return kind.model_validate_json(content or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ApiError(422, f"{place or 'the body'}: {first['msg']}", parameter=place) from None
