"""The reasons for a run's slowness, and for learning little: sentences with numbers, from the figures of its steps.

    findings.py   all causes, one after the other, in a table
    evidence.py   the figures that the causes read
    finding.py    a sentence, the seconds of a step that it may save, and the setting that would

Each other module is a cause: a function from the evidence to findings. It is silent where a figure that it needs is
missing.
"""
