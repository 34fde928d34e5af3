"""The check of a query where it is given: by the recipe's functions, or by a program that submits it."""

from ..core.errors import LocalProtocolError
from ..core.protocol.codec import Encoder
from .messages import Query


def query_problem(found: object) -> str | None:
    """The words for "it gives ..." if the rollout workers can't get ``found`` as a query; None if they can."""
    if not isinstance(found, Query):
        return f"{type(found).__name__}, not a Query"
    texts: tuple[object, object] = (found.id, found.text)
    data: object = found.data
    if not all(isinstance(text, str) for text in texts) or not isinstance(data, dict):
        return f"{found!r}: id and text must be strings, and data a dictionary"
    try:
        Encoder().pack(found)
    except LocalProtocolError as error:
        return f"the query {found.id!r}, which can't be sent to another process: {error}"
    return None
