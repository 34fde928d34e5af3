"""The lists of models: ``/v1/models`` and ``/v1/models/{model}``."""

from collections.abc import Sequence
from typing import Any, Final

_CREATED: Final = 0
"""Models have no birthday."""


def openai_models(models: Sequence[str], model: str) -> dict[str, Any]:
    """``model``: the model that is asked for; empty if all are."""
    listed = {
        name: {"id": name, "object": "model", "created": _CREATED, "owned_by": "flexmarl"} for name in models
    }
    return listed[model] if model else {"object": "list", "data": [*listed.values()]}


def anthropic_models(models: Sequence[str], model: str) -> dict[str, Any]:
    """``model``: the model that is asked for; empty if all are."""
    listed = {
        name: {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        for name in models
    }
    if model:
        return listed[model]
    return {"data": [*listed.values()], "has_more": False, "first_id": models[0], "last_id": models[-1]}
