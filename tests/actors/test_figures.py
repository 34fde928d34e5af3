"""The table of figures, and the rules that merge measurements."""

from collections.abc import Callable

import pytest
from pydantic import TypeAdapter, ValidationError

from flexmarl.actors.figures import FIGURES, StepFigures, UnknownFigure, divide_sums, drop_hidden_zeros
from flexmarl.actors.messages import GroupClosed, StepStats
from flexmarl.actors.names import AgentName, PolicyName, Step
from flexmarl.actors.step_metrics import SUBJECT_OF, StepMetrics


def test_measurements_are_merged_by_the_rule_of_their_row() -> None:
    figures = StepFigures("policy")
    for seconds in (1.0, 4.0, 2.5):
        figures.update(
            {"backward_s": seconds, "pause_mean_s": seconds, "pause_max_s": seconds, "publish_s": seconds}
        )
    numbers = figures.numbers()
    assert numbers["backward_s"] == 7.5 and numbers["pause_mean_s"] == 2.5
    assert numbers["pause_max_s"] == 4.0 and numbers["publish_s"] == 2.5


def test_a_figure_without_a_measurement_is_left_out_or_has_its_empty_value() -> None:
    assert StepFigures("policy").numbers() == {
        "carried_samples": 0, "stale_samples": 0, "max_staleness": 0, "backward_s": 0.0,
    }  # fmt: skip
    assert "reward" not in StepFigures("agent").numbers()


def test_counts_stay_whole_numbers() -> None:
    figures = StepFigures("step")
    figures.add("retried_turns", 2)
    assert type(figures.numbers()["retried_turns"]) is int


def test_a_sum_is_divided_by_its_count_and_left_out_without_it() -> None:
    figures = StepFigures("policy")
    figures.add("nonzero_advantage_share", 1)
    figures.add("nonzero_advantage_share", 2)
    assert "nonzero_advantage_share" not in figures.numbers()
    assert figures.numbers({"samples": 4})["nonzero_advantage_share"] == 0.75
    sums = {"entropy": 6.0, "kl": 1.0, "clip_fraction": 2.0}
    assert divide_sums("policy", sums, {"trained_tokens": 4, "compared_tokens": 4}) == {
        "entropy": 1.5, "clip_fraction": 0.5, "ratio_deviation": 0.0,
    }  # fmt: skip
    of_none = divide_sums("policy", sums, {"trained_tokens": 0, "compared_tokens": 0})
    assert of_none == {"clip_fraction": 0.0, "ratio_deviation": 0.0}, "no entropy without a token"


def test_some_figures_are_left_out_if_they_are_zero() -> None:
    idle = {"rss_mib": 0.0, "mailbox_served": 0, "lost_requests": 1}
    assert drop_hidden_zeros("process", idle) == {"rss_mib": 0.0, "lost_requests": 1}


def step_metrics(**more: object) -> StepMetrics:
    return StepMetrics(Step(1), 1.0, 1.0, 1.0, 0, 0.0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("subject", "measure"),
    [
        ("policy", lambda: StepFigures("policy").add("los", 1.0)),
        ("policy", lambda: StepStats(1, 1, {"los": 1.0})),
        ("agent", lambda: StepStats(1, 1, {}, {AgentName("a"): {"los": 1.0}})),
        ("step", lambda: GroupClosed(Step(1), "q", {}, {}, 0.0, {}, [], figures={"los": 1})),
        ("step", lambda: step_metrics(figures={"los": 1.0})),
        ("policy", lambda: step_metrics(by_policy={PolicyName("a"): {"los": 1.0}})),
    ],
)
def test_an_unknown_figure_is_refused_where_it_is_measured(
    subject: str, measure: Callable[[], object]
) -> None:
    with pytest.raises(UnknownFigure, match=f"^{subject} has no figure 'los'.*actors/figures.py"):
        measure()


def test_an_unknown_figure_is_refused_where_it_is_received() -> None:
    stats = {"samples": 1, "tokens": 2, "figures": {"los": 0.5}}
    with pytest.raises(ValidationError, match=r"has no figure 'los' \(but 'loss'\)"):
        TypeAdapter(StepStats).validate_python(stats)
    with pytest.raises(ValidationError, match="figures.loss"):
        TypeAdapter(StepStats).validate_python(stats | {"figures": {"loss": "much"}})
    received = TypeAdapter(StepStats).validate_python(
        stats | {"figures": {"loss": 0.5, "skipped_updates": 1}}
    )
    assert [type(value) for value in received.figures.values()] == [float, int]


def test_rows_can_be_told_apart_and_charts_name_existing_figures() -> None:
    names = [name for subject in SUBJECT_OF.values() for name in FIGURES[subject]]
    assert len(names) == len(set(names)), "an agent and its policy may have the same name"
    for rows in FIGURES.values():
        charts = [row.chart for row in rows.values() if row.chart is not None]
        assert len({chart.title for chart in charts}) == len(charts)
        assert all(chart.share_of in rows for chart in charts if chart.share_of)
        assert all(row.merge == "sum" for row in rows.values() if row.per)
        assert all("/" not in row.name and "|" not in row.meaning for row in rows.values())
