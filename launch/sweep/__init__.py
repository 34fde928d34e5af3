"""Several runs of a recipe that differ in a few settings."""
