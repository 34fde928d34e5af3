"""Checks the LoRA adapters of a config against the layers of their models."""

from collections.abc import Iterator
from importlib.util import find_spec

from ...config.run_config import RunConfig


def missing_library(config: RunConfig) -> Iterator[str]:
    """A line for each policy that is an adapter, if peft is not installed."""
    for name, policy in config.policies.items():
        if policy.lora is not None and find_spec("peft") is None:
            yield f"policies.{name}.lora: peft is not installed: pip install 'flexmarl[lora]'"


def target_problems(config: RunConfig, *, local_files_only: bool) -> Iterator[str]:
    """A line for each policy whose model does not have a target layer. Imports torch if there is an adapter."""
    for name, policy in config.policies.items():
        if policy.lora is None:
            continue
        from ....actors.pretrained import outline_of
        from ....actors.trainer.backends.torch_policy.lora_targets import target_names

        outline = outline_of(policy.real_model, local_files_only=local_files_only)
        try:
            target_names(outline, policy.lora)
        except ValueError as error:
            yield f"policies.{name}.lora.targets: {error}"
