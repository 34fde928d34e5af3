"""Task groups whose failure reads like the failure of a single call."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_error() -> Iterator[None]:
    """Raises the first error of a task group instead of the group.

        with first_error():
            async with asyncio.TaskGroup() as group:
                ...

    Errors that the other tasks raised while they were being cancelled are consequences, and are left out.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
