"""The base of every typed configuration: unknown keys and wrong types are refused."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Strict: `true`, `"8"` or `8.0` is no count, and a config that says so means something else.
Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Config(BaseModel):
    """A frozen section of the run's configuration. It may travel in messages as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
