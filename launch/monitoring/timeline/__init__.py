"""The timeline of a run: what each of its parts did, from when to when. Pure, over the files of the run's folder.

timeline.py       the reading API of the page: ``timeline(run_dir).view(...)`` and ``.span(...)``
stored_spans.py   reads the spans, also those that a running run adds
pixels.py         merges spans that are too narrow to be drawn
links.py          finds the spans that a span is linked with: query, turns, samples, micro-batch, step, install
marks.py          events of the run as marks in the timeline
labels.py         the text in a span
chrome_trace.py   all spans as a file for Perfetto and Chrome
"""
