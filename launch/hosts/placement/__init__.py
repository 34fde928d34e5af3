"""The place of each actor: its host and its GPUs. Pure: descriptions of hosts and a config come in, a plan comes out.

needs.py           the needs of each actor, from the config
model_memory.py    the memory of a model's weights, if its files are there (reads their headers)
needed.py          the types: needs, plans, refusals
place.py           needs and hosts -> a plan
room.py            the room that is left on a host
refusals.py        the reasons why needs don't fit, with the numbers and the keys
plan_table.py      a plan as a table
run_placement.py   the placement of a run, on this host or on several
"""
