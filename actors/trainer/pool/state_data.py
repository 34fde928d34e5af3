"""A policy's state without its tensors, on its way between a backend and messages."""

from collections.abc import Mapping
from typing import Any

from ....core.protocol.codec import Buffer
from ...messages import StateData


def sent_data(plain: Mapping[str, Any]) -> StateData:
    """A backend's data for a message: bytes travel beside the envelope, whose size is limited."""
    return {name: Buffer(value) if isinstance(value, bytes) else value for name, value in plain.items()}


def plain_data(sent: StateData) -> dict[str, Any]:
    """The inverse of ``sent_data``; the bytes are a view of the message's."""
    return {name: value.view if isinstance(value, Buffer) else value for name, value in sent.items()}
