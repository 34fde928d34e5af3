"""The contract of sinks: figures of a run are read back from their place, each step once, also after a resume."""

import asyncio
import importlib
import struct
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.run_events import Evaluated, RunEvent, SinkClosed, SinkFailed, SinkOpened
from flexmarl.actors.spans import record
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.monitoring.sinks.function_sink import FunctionSink
from flexmarl.launch.monitoring.sinks.prometheus_sink import name_and_labels
from flexmarl.launch.monitoring.sinks.run_sinks import RunSinks
from flexmarl.launch.monitoring.sinks.sink import Sink, SinkRun
from flexmarl.launch.monitoring.sinks.sink_config import (
    MlflowConfig,
    OpentelemetryConfig,
    PrometheusConfig,
    TensorboardConfig,
    WandbConfig,
)
from flexmarl.launch.run_folder.spans.span_log import SpanLog, count_spans
from flexmarl.launch.run_folder.spans.trace_config import TraceConfig

from ..core.span_batches import timeless_recorder
from ..patience import PATIENCE_S

Points = dict[int, float]
Curves = dict[str, Points]


@dataclass
class Written:
    """A sink and its reader. ``replaces``: the steps that a resumed run repeats have their new values."""

    sink: Callable[[], Sink]
    read: Callable[[], Curves]
    replaces: bool
    in_name: Callable[[str], str] = field(default=lambda key: key)


def _point(curves: Curves, name: str, step: int, value: float) -> None:
    points = curves.setdefault(name, {})
    assert step not in points, f"{name} has two values of step {step}"
    points[step] = value


def tensorboard(folder: Path) -> Written:
    pytest.importorskip("tensorboard", reason="flexmarl[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read() -> Curves:
        found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
        found.Reload()
        curves: Curves = {}
        for tag in found.Tags()["scalars"]:
            for event in found.Scalars(tag):
                _point(curves, tag, event.step, event.value)
        return curves

    return Written(TensorboardConfig().sink, read, replaces=True)


def wandb(folder: Path) -> Written:
    pytest.importorskip("wandb", reason="flexmarl[wandb] is not installed")
    records_of: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")  # without types

    def whole(file: Path) -> list[Any]:
        """Its process writes the last records when the run has ended for us already."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            records = [records_of.Record.FromString(data) for data in _leveldb_records(file.read_bytes())]
            if any(record.HasField("exit") for record in records):
                return records
            if time.monotonic() > deadline:
                pytest.fail(f"{file} has no end")
            time.sleep(0.01)

    def read() -> Curves:
        curves: Curves = {}
        names = set()
        for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
            names.add(file.name)
            for entry in whole(file):
                if not entry.HasField("history"):
                    continue
                for item in entry.history.item:
                    name = item.key or "/".join(item.nested_key)
                    if not name.startswith("_"):
                        _point(curves, name, entry.history.step.num, float(item.value_json))
        assert len(names) == 1, "a resumed run continues the same run of Weights & Biases"
        return curves

    return Written(WandbConfig(mode="offline", project="tests").sink, read, replaces=False)


def _leveldb_records(data: bytes) -> list[bytes]:
    """The records of a log in LevelDB's format, with a header of its own."""
    records, part, at = [], b"", 7
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole, or its last part
            records.append(part)
            part = b""
    return records


def mlflow(folder: Path) -> Written:
    pytest.importorskip("mlflow", reason="flexmarl[mlflow] is not installed")
    from mlflow import MlflowClient

    uri = str(folder / "mlruns")

    def read() -> Curves:
        client = MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name("tests")
        assert known is not None
        [run] = client.search_runs([known.experiment_id])
        assert run.info.status == "FINISHED" and run.data.params["training.steps"] == "6"
        curves: Curves = {}
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                _point(curves, name, metric.step, metric.value)
        return curves

    return Written(
        MlflowConfig(uri=uri, experiment="tests").sink,
        read,
        replaces=False,
        in_name=lambda key: key.replace("@", "_") if "/" in key else f"step/{key}",
    )


def function(folder: Path) -> Written:
    lives: list[Curves] = []

    def sink() -> Sink:
        curves: Curves = {}
        lives.append(curves)

        def collect(step: int, figures: Mapping[str, float]) -> None:
            for name, value in figures.items():
                _point(curves, name, step, value)

        return FunctionSink(collect)

    def read() -> Curves:
        joined: Curves = {}
        for life in lives:
            for name, points in life.items():
                joined.setdefault(name, {}).update(points)
        return joined

    return Written(sink, read, replaces=True)


class Collector:
    """A collector of OpenTelemetry: an HTTP server that keeps what it gets. ``refuses``: answers with status 400."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.spans: list[Any] = []
        self.refuses = False
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if not collector.refuses:
                    collector.take(self.path, body)
                self.send_response(400 if collector.refuses else 200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        if path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.metrics.append([metric for scope in resource.scope_metrics for metric in scope.metrics])
        else:
            assert path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def curves(self) -> Curves:
        curves: Curves = {}
        for metrics in self.metrics:
            [step] = [int(m.gauge.data_points[0].as_double) for m in metrics if m.name == "flexmarl_step"]
            for metric in metrics:
                for point in metric.gauge.data_points if metric.name != "flexmarl_step" else ():
                    labels = {label.key: label.value.string_value for label in point.attributes}
                    _point(curves, f"{metric.name}{labels}", step, point.as_double)
        return curves

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="flexmarl[opentelemetry] is not installed")
    collector = Collector()
    yield collector
    collector.close()


def opentelemetry(_: Path, collector: Collector) -> Written:
    def in_name(key: str) -> str:
        name, labels = name_and_labels(key)
        return f"{name}{dict(labels)}"

    sink = OpentelemetryConfig(endpoint=collector.address).sink
    return Written(sink, collector.curves, replaces=False, in_name=in_name)


@pytest.fixture(params=[tensorboard, wandb, mlflow, opentelemetry, function], ids=lambda made: made.__name__)
def written(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Written]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its local store without a database
    # wandb makes folders as it is imported, and removes them when the process ends.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.getbasetemp()))
    given = (request.getfixturevalue("collector"),) if request.param is opentelemetry else ()
    made: Written = request.param(tmp_path, *given)
    yield made
    if request.param is wandb:
        importlib.import_module("wandb").teardown()  # a process that it keeps for later runs


def step(number: int, loss: float) -> StepMetrics:
    return StepMetrics(
        Step(number), 1.0 * number, 1.0, 0.5, 30, 30.0,
        eval_s=9.0,
        evaluation={"accuracy": 0.5},
        by_agent={AgentName("solver"): {"reward": 0.25 * number}},
        versions={PolicyName("a"): Version(number)},
        generated_by={PolicyName("a"): Version(number - 1)},
        by_policy={PolicyName("a"): {"loss": loss}},
        by_actor={"router": {"turns.a-0": 8.0 * number}},
    )  # fmt: skip


async def life(
    written: Written, folder: Path, steps: Mapping[int, float], resumed: int = 0
) -> list[RunEvent]:
    said: list[RunEvent] = []
    run = SinkRun(folder, folder, resumed, {"training.steps": 6, "recipe": "sort"})
    async with RunSinks([("one", written.sink())], run, said.append) as sinks:
        if not resumed:
            sinks.event(Evaluated(Step(0), 2.0, {"accuracy": 0.125, "pass@8": 0.5}))
        for number, loss in steps.items():
            if number == 2:
                sinks.event(Evaluated(Step(2), 2.0, {"accuracy": 0.75, "pass@8": 1.0}))
            sinks.step(step(number, loss))
    assert not [event for event in said if isinstance(event, SinkFailed)]
    return said


async def test_each_figure_is_there_once_by_its_name_and_step(written: Written, tmp_path: Path) -> None:
    said = await life(written, tmp_path, {1: 0.5, 2: 0.25, 3: 0.125})
    opened, closed = said
    assert isinstance(opened, SinkOpened) and closed == SinkClosed("one", 5, 0, 0)
    found = written.read()
    expected: Curves = {
        "loss/a": {1: 0.5, 2: 0.25, 3: 0.125},
        "reward/solver": {1: 0.25, 2: 0.5, 3: 0.75},
        "versions/a": {1: 1.0, 2: 2.0, 3: 3.0},
        "actor.turns.a-0/router": {1: 8.0, 2: 16.0, 3: 24.0},
        "eval/accuracy": {0: 0.125, 2: 0.75},
        "eval/pass@8": {0: 0.5, 2: 1.0},
        "eval_s": {0: 2.0, 2: 2.0},
        "tokens": dict.fromkeys((1, 2, 3), 30.0),
    }
    for key, points in expected.items():
        assert found[written.in_name(key)] == points, key


async def test_a_resumed_run_continues_the_series_without_doubled_steps(
    written: Written, tmp_path: Path
) -> None:
    await life(written, tmp_path, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    await life(written, tmp_path, {3: 30.0, 4: 40.0, 5: 50.0, 6: 60.0}, resumed=2)
    repeated = {3: 30.0, 4: 40.0} if written.replaces else {3: 3.0, 4: 4.0}
    assert written.read()[written.in_name("loss/a")] == {1: 1.0, 2: 2.0, **repeated, 5: 50.0, 6: 60.0}


async def test_weights_and_biases_without_a_login_asks_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.getbasetemp()))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    library = pytest.importorskip("wandb", reason="flexmarl[wandb] is not installed")
    said: list[RunEvent] = []
    async with RunSinks([("wandb", WandbConfig().sink())], SinkRun(tmp_path, tmp_path), said.append) as sinks:
        sinks.step(step(1, 0.5))
    library.teardown()
    [failed, closed] = said
    assert isinstance(failed, SinkFailed) and "not logged in: run wandb login" in failed.error
    assert closed == SinkClosed("wandb", 0, 1, 2)


# --------------------------------------------------------------------------- Prometheus


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[RunSinks, list[RunEvent]]]:
    pytest.importorskip("prometheus_client", reason="flexmarl[prometheus] is not installed")
    said: list[RunEvent] = []
    run = SinkRun(tmp_path / "first", tmp_path)
    async with RunSinks([("prometheus", PrometheusConfig(port=0).sink())], run, said.append) as sinks:
        yield sinks, said


async def test_metrics_are_fetched_over_http(served: tuple[RunSinks, list[Any]]) -> None:
    sinks, said = served
    sinks.event(Evaluated(Step(0), 2.0, {"accuracy": 0.125}))
    sinks.step(step(1, 0.5))
    sinks.step(step(2, 0.25))

    def page() -> str:
        with urllib.request.urlopen(said[0].place, timeout=PATIENCE_S) as answer:  # of this test
            text: str = answer.read().decode()
            return text

    async with asyncio.timeout(PATIENCE_S):
        while not said or "flexmarl_step 2.0" not in (text := await asyncio.to_thread(page)):
            await asyncio.sleep(0.01)
    lines = text.splitlines()
    series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series)), "each series has one value"
    for line in (
        'flexmarl_run{run="first"} 1.0',
        'flexmarl_loss{policy="a"} 0.25',
        'flexmarl_reward{agent="solver"} 0.5',
        'flexmarl_versions{policy="a"} 2.0',
        'flexmarl_eval{metric="accuracy"} 0.125',
        'flexmarl_actor_turns{actor="router",part="a-0"} 16.0',
    ):
        assert line in lines


# --------------------------------------------------------------------------- OpenTelemetry


class TestSpansOfOpentelemetry:
    """A run with one trajectory of one turn, an evaluation's twice, and a step."""

    def test_form_traces_of_trajectories_and_steps(self, collector: Collector, tmp_path: Path) -> None:
        self.record(tmp_path)
        self.send(collector, tmp_path)
        spans = {span.name: span for span in collector.spans}
        trajectory, turn, generate = spans["q1 #0"], spans["solver · q1 #0 turn 0"], spans["a · q1 #0 turn 0"]
        assert turn.parent_span_id == trajectory.span_id and not trajectory.parent_span_id
        assert generate.parent_span_id == turn.span_id
        assert trajectory.trace_id == turn.trace_id == generate.trace_id
        step, optimizer = spans["step 1"], spans["a v1"]
        assert optimizer.parent_span_id == step.span_id and optimizer.trace_id == step.trace_id
        assert len({span.span_id for span in collector.spans}) == len(collector.spans) == 7
        assert turn.end_time_unix_nano - turn.start_time_unix_nano == 2 * 10**9
        attributes = {each.key: each.value for each in turn.attributes}
        assert attributes["flexmarl.agent"].string_value == "solver"
        assert attributes["flexmarl.tokens"].int_value == 64
        assert "flexmarl.micro_batch" not in attributes

    def test_of_evaluations_have_ids_of_their_own(self, collector: Collector, tmp_path: Path) -> None:
        self.record(tmp_path)
        self.send(collector, tmp_path)
        evaluations = [span for span in collector.spans if span.name == "q9 #0"]
        assert len({span.span_id for span in evaluations}) == 2

    def test_are_sent_again_after_a_refusal(self, collector: Collector, tmp_path: Path) -> None:
        self.record(tmp_path)
        sink = OpentelemetryConfig(endpoint=collector.address).sink()
        sink.open(SinkRun(tmp_path, tmp_path), "")
        collector.refuses = True
        with pytest.raises(OSError, match="has not taken 7 spans"):
            sink.close(failed=False)
        collector.refuses = False
        sink.open(SinkRun(tmp_path, tmp_path), "")
        sink.close(failed=False)
        assert len(collector.spans) == 7

    def test_of_lives_before_are_not_sent_again(self, collector: Collector, tmp_path: Path) -> None:
        """Also those of a life that has ended before its first checkpoint: the run begins again with step 1."""
        self.record(tmp_path)
        sink = OpentelemetryConfig(endpoint=collector.address).sink()
        sink.open(SinkRun(tmp_path, tmp_path, spans=count_spans(tmp_path / "trace")), "")
        self.record(tmp_path)
        sink.close(failed=False)
        assert len(collector.spans) == 7

    @staticmethod
    def record(folder: Path) -> None:
        recorder = timeless_recorder()
        of_turn = {"query": "q1", "trajectory": 0, "step": 1}
        record(recorder, "rollout-0 trajectories", "trajectory", 1.0, 5.0, **of_turn)  # type: ignore[arg-type]
        of_turn |= {"turn": 0, "tokens": 64}
        record(recorder, "rollout-0 turns", "turn", 2.0, 4.0, agent="solver", **of_turn)  # type: ignore[arg-type]
        record(recorder, "a-0", "generate", 2.5, 4.0, policy="a", **of_turn)  # type: ignore[arg-type]
        record(recorder, "slot-0", "optimizer", 5.0, 6.0, policy="a", version=1, step=1)
        record(recorder, "orchestrator", "step", 1.0, 6.0, step=1)
        for begin in (7.0, 8.0):
            record(recorder, "rollout-0 trajectories", "trajectory", begin, 9.0, "q9", trajectory=0)
        (folder / "trace").mkdir(exist_ok=True)
        with closing(SpanLog(folder / "trace", TraceConfig(), print)) as log:
            log.add("all", "host", recorder.take(1.0, 0))

    @staticmethod
    def send(collector: Collector, folder: Path) -> None:
        sink = OpentelemetryConfig(endpoint=collector.address).sink()
        sink.open(SinkRun(folder, folder), "")
        sink.close(failed=False)


async def test_a_collector_that_is_not_there_costs_figures_and_names_itself(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="flexmarl[opentelemetry] is not installed")
    said: list[RunEvent] = []
    collector = Collector()
    collector.close()
    sink = OpentelemetryConfig(endpoint=collector.address).sink()
    async with RunSinks([("opentelemetry", sink)], SinkRun(tmp_path, tmp_path), said.append) as sinks:
        sinks.step(step(1, 0.5))
        async with asyncio.timeout(PATIENCE_S):
            while not any(isinstance(event, SinkFailed) for event in said):
                await asyncio.sleep(0.01)
    [failed] = [event for event in said if isinstance(event, SinkFailed)]
    assert failed.error == "OSError: the collector has not taken the figures of step 1"
    assert said[-1] == SinkClosed("opentelemetry", 0, 1, 1)
