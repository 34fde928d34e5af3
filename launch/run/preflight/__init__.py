"""The checks of ``flexmarl train`` before anything starts, in a process of their own.

A recipe is a user's code: it may import anything, change the process that imports it, and take long. So it is imported
in a process that ends with the checks, and writes no files.

    preflight.py      starts that process and reads its findings
    process.py        the process
    recipe_checks.py  the recipe: its functions, its data, its first queries
    adapter_checks.py LoRA adapters and the layers that they are for
    data_process.py   another process, which makes the first training queries too: data_comparison.py
    model_checks.py   models, tokenizers and devices
    chat_checks.py    tokens of messages
    trial.py          plays a trajectory: trial_worker.py has the actors, trial_findings.py refuses or warns
"""
