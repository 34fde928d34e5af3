"""The runs of ``tests/launch``."""

from ..conftest import launcher

__all__ = ["launcher"]
