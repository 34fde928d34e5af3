"""Looks for the packages that engines need, without importing them."""

from collections.abc import Iterator
from importlib.util import find_spec

from ..run_config import RunConfig


def engine_problems(config: RunConfig) -> Iterator[str]:
    """A line for each policy whose engine's package is missing."""
    for name, policy in config.policies.items():
        engine = policy.engine
        if engine.package is not None and find_spec(engine.package) is None:
            yield (
                f"policies.{name}.engine.name={engine.name}: the package {engine.package} is not installed: "
                f"{engine.install}"
            )
