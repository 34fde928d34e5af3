"""The metrics page has what the table of figures gives."""

import pytest

from flexmarl.actors.figures import FAMILIES, FIGURES
from scripts import metrics_page


def test_the_committed_page_is_what_the_table_gives() -> None:
    page = metrics_page.PAGE.read_text()
    assert page == metrics_page.rendered(page), "run python scripts/metrics_page.py"
    for subject in (*FIGURES, "families"):
        assert page.count(f"<!-- figures: {subject} -->") == 1


def test_a_table_has_a_row_for_each_figure_and_leaves_other_text_alone() -> None:
    page = "before\n<!-- figures: device -->\nold\n<!-- end -->\nafter\n"
    rows = [f"| `{name}/<device>` |" for name in FIGURES["device"]]
    found = metrics_page.rendered(page)
    assert found.startswith("before\n") and found.endswith("<!-- end -->\nafter\n") and "old" not in found
    assert all(row in found for row in rows) and found.count("\n| `") == len(rows)
    families = metrics_page.rendered("<!-- figures: families -->\n<!-- end -->")
    assert all(f"| `{family}/<metric>` |" in families for family in FAMILIES)


def test_an_unknown_subject_is_an_error() -> None:
    with pytest.raises(KeyError, match="tea"):
        metrics_page.rendered("<!-- figures: tea -->\n<!-- end -->")
