"""The base of every typed configuration: unknown keys and wrong types are refused."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def no_bool(value: object) -> object:
    """``value``, for fields of type float: pydantic would take ``true`` for 1.0."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not a truth value")
    return value


# Strict: ``true``, ``"8"`` or ``8.0`` is not a count; such a config means something else.
Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, BeforeValidator(no_bool), Field(gt=0)]
NonNegative = Annotated[float, BeforeValidator(no_bool), Field(ge=0)]
Share = Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)]
Seconds = Positive


class Config(BaseModel):
    """A frozen section of the run's configuration. It can be sent in messages."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
