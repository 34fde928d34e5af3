"""The report of a run, one HTML file.

Its modules:

    report.py              writes the page: header, key figures, failures, events, configuration
    training_sections.py   tables of rewards by agent and figures of training by policy
    training_charts.py     charts of the same, of turns, and of a workflow's own metrics
    evaluation_sections.py charts of all metrics of the evaluations
    pool_sections.py       a shared training pool: what each policy did, and why it was suspended
    time_sections.py       parts of a step, throughput, processes
    page_parts.py          tables, notes and charts over the steps
    charts.py              charts as SVG
    run_history.py         reads the run folder
    report.html            frame, style and script of the page
"""
