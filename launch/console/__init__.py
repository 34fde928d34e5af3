"""The display of a run and its log files.

Its modules:

    run_console.py      the actor that receives metrics and events, shows them and writes them
    progress.py         the display: steps, phases, notes and warnings, at a limited rate
    progress_state.py   its numbers
    progress_views.py   its two forms: a live table and plain lines
    rate_limit.py       lines and redraws per second
    lossy_output.py     a standard output that survives a closed pipe
"""
