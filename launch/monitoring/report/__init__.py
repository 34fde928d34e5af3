"""The history of a run, read from its folder."""
