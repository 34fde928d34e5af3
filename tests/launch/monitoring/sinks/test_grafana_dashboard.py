"""The dashboard for Grafana: every metric in it is one that the Prometheus sink has."""

import json
import re
from importlib.resources import files
from typing import Any, Final

import pytest

from flexmarl.actors.figures import FAMILIES, FIGURES
from flexmarl.actors.step_metrics import SUBJECT_OF
from flexmarl.launch.monitoring.sinks.prometheus_sink import name_and_labels

from ...conftest import Launched

DASHBOARD: Final[dict[str, Any]] = json.loads(
    files("flexmarl.launch.monitoring.sinks").joinpath("grafana_dashboard.json").read_text()
)
PANELS: Final = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS: Final = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
RUN: Final = ("flexmarl_run", {"run", "instance"})
OF_TARGET: Final = {"instance", "job"}
"""The labels that Prometheus adds."""


def exported(whole: Launched) -> dict[str, set[str]]:
    """By metric: its labels. Those of all figures, and those of actors that a run has measured."""
    keys = [*FIGURES["step"], *(f"{family}/x" for family in (*FAMILIES, "eval"))]
    keys += [f"{figure}/x" for subject in SUBJECT_OF.values() for figure in FIGURES[subject]]
    keys += [key for line in whole.metrics for key in line if key.startswith("actor.")]
    labels: dict[str, set[str]] = {}
    for name, of in map(name_and_labels, keys):
        labels.setdefault(name, set()).update(of)
    return labels


def test_every_metric_and_label_is_one_that_the_sink_has(whole: Launched) -> None:
    metrics = exported(whole)
    for title, target in TARGETS:
        names = re.findall(r"flexmarl_\w+", target["expr"])
        assert names, title
        for name in names:
            assert name in metrics, f"{title}: {name}"
            labels = {
                *re.findall(r"{{(\w+)}}", target["legendFormat"]),
                *re.findall(r'(\w+)=~?"', target["expr"]),
            }
            assert labels <= metrics[name] | OF_TARGET, f"{title}: {name} {labels}"


def test_its_variable_is_of_the_run(whole: Launched) -> None:
    [query] = [variable for variable in DASHBOARD["templating"]["list"] if variable["name"] == "instance"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query["query"]["query"]).groups()  # type: ignore[union-attr]
    assert name == RUN[0] and label in RUN[1]
    assert all('{instance=~"$instance"}' in target["expr"] for _, target in TARGETS)


def test_panels_have_titles_and_places_of_their_own() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS if panel["type"] == "timeseries"}) == len(PANELS) - 4
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", ["flexmarl_reward", "flexmarl_step_s", "flexmarl_actor_engine_waiting"])
def test_what_people_ask_for_first_is_there(name: str) -> None:
    assert any(name in target["expr"] for _, target in TARGETS)
