"""The base of every typed configuration: unknown keys and wrong types are refused."""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag


def no_bool(value: object) -> object:
    """``value``, for fields of type float: pydantic would take ``true`` for 1.0."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not a truth value")
    return value


def no_other_text(value: object) -> object:
    """``value``, for numbers that may be ``auto``."""
    if isinstance(value, str) and value != AUTO:
        raise ValueError(f"a number is wanted, or {AUTO}")
    return value


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a number, as the page of settings shows it."""

    name: str


AUTO: Final = "auto"
"""A number that is left to the plan of the run's hosts."""

# Strict: ``true``, ``"8"`` or ``8.0`` is not a count; such a config means something else.
Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, BeforeValidator(no_bool), Field(gt=0)]
NonNegative = Annotated[float, BeforeValidator(no_bool), Field(ge=0)]
Share = Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)]
Seconds = Annotated[Positive, Unit("s")]
# Chosen by the value: a mistake is reported of the one kind that was meant, not of both.
AutoCount = Annotated[
    Annotated[int, Tag("number"), Field(strict=True, ge=1)] | Annotated[Literal["auto"], Tag(AUTO)],
    Discriminator(lambda value: AUTO if value == AUTO else "number"),
    BeforeValidator(no_other_text),
]


class Config(BaseModel):
    """A frozen section of the run's configuration. It can be sent in messages.

    The text under a field describes it for users, in Markdown: ``scripts/settings_page.py`` makes the tables of
    ``launch/docs/settings.md`` from it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Labelled(Protocol):
    @property
    def label(self) -> str: ...


Entry = TypeVar("Entry", bound=_Labelled)


def each_label_once(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """``entries`` of a list in the config. Raises ValueError if two have one label."""
    labels = [entry.label for entry in entries]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"{twice[0]} is there twice")
    return entries


def chosen_by_name(default: str) -> Discriminator:
    """Chooses one of several classes of a section by its key ``name``; without one, the class tagged ``default``."""

    def name_of(section: Any) -> Any:
        if isinstance(section, dict):
            return section.get("name", default)
        return getattr(section, "name", default)

    return Discriminator(name_of)
