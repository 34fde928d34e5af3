"""The deadline of every wait in a test that is in real time."""

PATIENCE_S = 300.0
"""Only a wait that would never end takes as long: a busy machine takes its time."""
