"""The tests that a session left out, by reason, at the end of its output."""

from collections import Counter

import pytest


class LeftOutPlugin:
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        reasons: Counter[tuple[str, str]] = Counter()
        for report in terminalreporter.stats.get("skipped", ()):
            # A file, a line and "Skipped: the reason". A report of the collection is of a whole file.
            what = "test" if isinstance(report, pytest.TestReport) else "file"
            reasons[what, report.longrepr[2].removeprefix("Skipped: ").strip()] += 1
        if reasons:
            terminalreporter.section("left out")
            for (what, reason), count in sorted(reasons.items()):
                terminalreporter.line(f"{count} {what}{'s' * (count > 1)}: {reason}")
