"""The page of runs in a browser: live from a server, or one file with the data inside.

A panel of the page is one Python file here, whose ``view`` makes JSON-able values of a run's folder; one module in
``web/panels``, which draws them; and one row of ``panels.PANELS``.
"""
