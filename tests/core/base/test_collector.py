"""The garbage collector while large libraries are imported, and afterwards."""

import gc
from collections.abc import Iterator

import pytest

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.base.collector import importing, spare_collector
from flexmarl.core.supervision.supervisor import Supervisor

AT_IMPORT = gc.isenabled()


class Rests(Actor):
    @endpoint
    async def collector(self) -> tuple[bool, bool, int]:
        """Enabled while this module was imported; enabled now; the number of skipped objects."""
        return AT_IMPORT, gc.isenabled(), gc.get_freeze_count()


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()
    spare_collector()


def test_it_rests_in_the_block_and_skips_the_objects_made_there() -> None:
    runs: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        runs.append(phase)

    gc.callbacks.append(note)
    try:
        before = gc.get_freeze_count()
        with importing():
            made = [[number] for number in range(10_000)]
        assert not runs
        assert gc.get_freeze_count() - before >= len(made)
        assert gc.isenabled()
        gc.collect()
        assert runs, "the callback is called"
    finally:
        gc.callbacks.remove(note)


def test_it_is_enabled_again_after_an_error_and_at_the_end_of_the_outer_block() -> None:
    with pytest.raises(ImportError), importing():
        with importing():
            pass
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


async def test_an_actors_process_imports_its_class_without_it(supervisor: Supervisor) -> None:
    actor = await supervisor.spawn("base.test_collector:Rests", "rests")
    while_imported, afterwards, frozen = await actor.api.collector()
    assert not while_imported
    assert afterwards
    assert frozen > 10_000
