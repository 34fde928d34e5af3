"""The garbage collector in processes of flexmarl's own."""

import contextlib
import gc
from collections.abc import Iterator

# Python's default is (700, 10, 10). Messages leave no reference cycles: the search for them took a third of the time of
# a store with many rows, and of a caller with 1000 calls in flight.
_THRESHOLD = (20_000, 10, 10)


def spare_collector() -> None:
    """Lets the collector run rarely, and skip all objects so far: modules, say. For the end of a process's start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLD)


@contextlib.contextmanager
def collecting_afterwards() -> Iterator[None]:
    """Work of about a second: the collector rests meanwhile, and then looks through what the work has left."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Imports of large libraries: the collector rests meanwhile, and skips their objects afterwards.

    Their modules, functions and classes stay. The search for cycles among them takes a quarter of the CPU time of the
    import of torch and transformers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
