"""A module that can't be imported."""

raise RuntimeError("no such device")
