"""Serves the newest figures at ``/metrics``, for Prometheus.

flexmarl_step_s 0.71
flexmarl_loss{policy="solver"} 0.02
flexmarl_eval{metric="accuracy"} 0.98
flexmarl_actor_turns{actor="router",part="solver-0"} 4012
"""

import re
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ...run_folder.json_lines import label_of
from .sink import Figures, Sink, SinkRun

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

_REFUSED: Final = re.compile(r"\W", re.ASCII)
_OF_ACTOR: Final = "actor."


class PrometheusSink(Sink):
    """Keeps the newest value of each figure. Nothing is written: Prometheus fetches them."""

    appends_only = False

    def __init__(self, port: int, address: str) -> None:
        """``port``: 0 for any free one."""
        self._port, self._address = port, address
        self._figures: dict[str, float] = {}
        self._lock = threading.Lock()
        self._run = ""
        self._server: tuple[Any, threading.Thread] | None = None

    def open(self, run: SinkRun, series: str) -> tuple[str, str]:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = run.name
        registry = CollectorRegistry()
        registry.register(self)
        self._server = start_http_server(self._port, self._address, registry)
        return "", f"http://{self._address}:{self._server[0].server_port}/metrics"

    def write(self, figures: Figures) -> None:
        with self._lock:
            self._figures.update(figures.figures)

    def close(self, failed: bool) -> None:
        assert self._server is not None, "it was opened"
        server, thread = self._server
        server.shutdown()
        server.server_close()
        thread.join()

    def collect(self) -> "Iterator[GaugeMetricFamily]":
        """For each request, in a thread of the server."""
        from prometheus_client.core import GaugeMetricFamily

        of_run = GaugeMetricFamily("flexmarl_run", "1, with the name of the run.", labels=["run"])
        of_run.add_metric([self._run], 1.0)
        yield of_run
        with self._lock:
            figures = dict(self._figures)
        families: dict[str, Any] = {}
        for key, value in figures.items():
            name, labels = name_and_labels(key)
            if name not in families:
                families[name] = GaugeMetricFamily(name, f"{key.partition('/')[0]} of metrics.jsonl")
            families[name].add_sample(name, dict(labels), value)  # of a step as a whole: without a label
        yield from families.values()


def name_and_labels(key: str) -> tuple[str, Mapping[str, str]]:
    """Prometheus' name and labels of a key of ``metrics.jsonl``."""
    field, slash, of = key.partition("/")
    if field.startswith(_OF_ACTOR):
        figure, _, part = field.removeprefix(_OF_ACTOR).partition(".")
        return _plain(f"actor_{figure}"), {"actor": of, "part": part}
    return _plain(field), {label_of(field): of} if slash else {}


def _plain(name: str) -> str:
    return f"flexmarl_{_REFUSED.sub('_', name)}"
