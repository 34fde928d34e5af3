"""Fixtures of the tests of engines."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["at once", "asynchronous"])
def scheduling(request: pytest.FixtureRequest) -> Iterator[str]:
    """The scheduling of vLLM's engines that are made meanwhile: as on CPUs, and as on GPUs."""
    from .vllm_scheduling import scheduled_asynchronously

    with ExitStack() as stack:
        if request.param == "asynchronous":
            stack.enter_context(scheduled_asynchronously())
        yield request.param


@pytest.fixture(scope="module")
def shared(scheduling: str) -> Iterator[Any]:
    """One engine of vLLM for the tests of a file, which makes no other: a process can have one at a time."""
    from .vllm_engines import made, model_of

    assert scheduling
    engine = made(model_of())
    yield engine
    engine.close()
