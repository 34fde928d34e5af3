"""Runs that stand still: they are noticed, and the causes are named."""
