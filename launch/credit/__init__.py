"""Shapley values of a run's agents: each one's share of the success that training has brought."""
