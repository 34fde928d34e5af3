"""flexmarl: trains several LLM agents together with reinforcement learning.

The packages are ``flexmarl.core`` (actor runtime), ``flexmarl.transport`` (Set/Get of training
states), ``flexmarl.actors`` (the four roles) and ``flexmarl.launch`` (processes, files, people).
"""

__version__ = "0.1.0"
