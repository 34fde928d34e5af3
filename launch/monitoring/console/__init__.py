"""The display of a run and its log files.

Its modules:

    run_console.py      the actor that receives metrics and events, shows them and writes them
    display.py          the interface of its displays
    progress.py         the display for people: steps, phases, notes and warnings, at a limited rate
    progress_state.py   its numbers
    progress_views.py   two of its forms: plain lines, and warnings alone
    live_view.py        its form on a terminal: a live table
    event_text.py      events as lines of text
    json_display.py     the display for programs: a JSON object per line
    rate_limit.py       lines and redraws per second
    lossy_output.py     a standard output that survives a closed pipe
    terminal.py         rich's console, which shows control characters and knows no markup
    echo.py             the same for plain lines, and JSON
"""
