"""The spans of a run in its folder: written by the launcher, and read while the run runs or later."""
