"""The recorded trajectories of a run, in one SQLite file of its folder.

sample_file.py     writes it, ``archive.py`` is the actor of the launcher around it
reader.py          reads it, also of a run that is running: ``flexmarl.Samples``
showing.py         the output of ``flexmarl samples``; ``conversation.py`` is that of one trajectory
"""
