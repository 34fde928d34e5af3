"""Asynchronous scheduling on CPUs. A module of its own: a conftest that imports models loads PyTorch's compiler before
the session has its folders."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def scheduled_asynchronously() -> Iterator[None]:
    """Engines that are made here schedule as their options say, and as they do on GPUs: vLLM's platform for CPUs would
    switch it off."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_all_but_scheduling(config: Any) -> None:
        is_asynchronous = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = is_asynchronous

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_all_but_scheduling))
        yield
