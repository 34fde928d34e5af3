"""Looks for the libraries that engines and sinks need, without importing them."""

from collections.abc import Iterator

from ...config.run_config import RunConfig


def engine_problems(config: RunConfig) -> Iterator[str]:
    """A line for each policy whose engine can't be used on this machine."""
    for name, policy in config.policies.items():
        model = policy.used_model
        problem = policy.engine.unavailable("cpu" if model is None else model.device)
        if problem is not None:
            yield f"policies.{name}.engine.name={policy.engine.name}: {problem}"


def sink_problems(config: RunConfig) -> Iterator[str]:
    """A line for each sink whose package is missing."""
    for number, sink in enumerate(config.sinks):
        if (problem := sink.unavailable()) is not None:
            yield f"sinks.{number}.name={sink.name}: {problem}"
