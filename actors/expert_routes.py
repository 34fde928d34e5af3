"""The experts that an engine chose for the tokens of a turn, on their way to the trainer.

A mixture of experts computes each token with a few of its experts. If two of them score nearly the same, rounding has
the trainer choose another one than the engine did, and then it does not train the policy that generated. With
``model.router_replay`` the trainer takes the engine's choice, and weighs the chosen experts by its own scores: rollout
routing replay, R3 (Ma et al., arXiv 2510.11370, section 3).

    engine    EngineResult.routes          of all tokens that it has computed: prompt and answer, but for the last token
    instance  Generation.routes            the same in a message
    rollout   ResumableTurn                ``join_routes``, if several versions generated the turn
    store     the column ``ROUTES_COLUMN`` of a sample
    trainer   ``actors/routers.py``

Routes are arrays ``[tokens, layers, experts of a token]``: uint8, or int16 for models with more experts than that has
room for. A layer without experts has any numbers.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..core.protocol.codec import Buffer
from .columns.declared_columns import Column

Routes = NDArray[Any]
"""``[tokens, layers, experts of a token]`` uint8 or int16."""

ROUTES_COLUMN: Final = "expert_routes"
"""The column of a sample that has its routes; tables of policies that replay them have it."""

ROUTES: Final = Column(type="tensor", shape=(None, None, None))
"""A column whose type the number of experts decides. Not required: outside programs know no routes of their answers."""

UNKNOWN: Final = -1
"""The expert, in routes that ``widen`` gives, of a token whose experts nothing has recorded: the trainer chooses it."""

_UNKNOWN_BYTE: Final = 255


def dtype_of(experts: int) -> "np.dtype[Any]":
    """The type of the routes of a model with so many ``experts`` in a layer."""
    return np.dtype(np.uint8) if experts <= _UNKNOWN_BYTE else np.dtype(np.int16)


def narrow(routes: NDArray[Any], experts: int) -> Routes:
    """``routes`` of any integers, as an array of their own in the type for so many ``experts``."""
    return np.array(routes, dtype_of(experts), order="C")


def join_routes(former: Routes | None, later: Routes) -> Routes:
    """The routes of a turn that an engine has continued: those of ``former``, if there are any, then those that
    ``later`` has beyond them.

    A continued turn computes the tokens before it once more, under newer weights. The former routes stay: they are of
    the weights that drew those tokens."""
    return later if former is None else np.concatenate([former, later[len(former) :]])


def routes_column(routes: Routes | None) -> dict[str, Routes]:
    """The declared column of a sample with ``routes``, by its name; empty without."""
    return {} if routes is None else {ROUTES_COLUMN: routes}


def widen(routes: Routes) -> NDArray[np.int16]:
    """``routes`` as int16, with ``UNKNOWN`` for the highest of uint8, for which there is no expert."""
    wide = routes.astype(np.int16)
    if routes.dtype == np.uint8:
        wide[routes == _UNKNOWN_BYTE] = UNKNOWN
    return wide


@dataclass(frozen=True, slots=True)
class SentRoutes:
    """Routes in a message. ``data``: row-major, little-endian."""

    dtype: str
    shape: tuple[int, int, int]
    data: Buffer

    @classmethod
    def of(cls, routes: Routes | None) -> "SentRoutes | None":
        """None for a result without routes."""
        if routes is None:
            return None
        tokens, layers, experts = routes.shape
        return cls(routes.dtype.name, (tokens, layers, experts), Buffer(np.ascontiguousarray(routes).data))

    def array(self) -> Routes:
        """The routes, read-only, in the memory of the message."""
        return np.frombuffer(self.data.view, self.dtype).reshape(self.shape)
