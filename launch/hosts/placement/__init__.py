"""The place of each actor: its host and its GPUs. Pure: descriptions of hosts and a config come in, a plan comes out.

actor_needs.py     the needs of each actor, from the config
model_memory.py    the memory of a model's weights, if its files are there (reads their headers)
plan.py            the types: a need, a plan, and the error for needs that fit no plan
place.py           needs and hosts -> a plan
capacity.py        the capacity that is left on a host
infeasible.py      the reasons why no plan can exist, with the numbers and the keys
plan_table.py      a plan as a table
run_placement.py   the placement of a run, on this host or on several
nearest_plan.py    the plan of a run, or its refusal with the nearest settings that fit
"""
