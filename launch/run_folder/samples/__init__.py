"""The recorded trajectories of a run, in one SQLite file of its folder.

sample_file.py     writes it, ``archive.py`` is the actor of the launcher around it
reader.py          reads it, also of a run that is running: ``flexmarl.Samples``
command.py         ``flexmarl samples``, shown by ``conversation.py``
"""
