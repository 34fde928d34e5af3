"""A run in a terminal: the same views as the page's, redrawn as the run changes."""
