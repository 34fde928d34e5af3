"""Sends figures and spans to a collector of OpenTelemetry, by OTLP over HTTP.

    flexmarl_loss{policy="solver"}                figures have the names and labels of the sink ``prometheus``
    trajectory > turn > prefill, decode, sample    a trajectory is a trace, and so is a step of the run;
    step > optimizer, checkpoint                   other spans, as installs, have traces by policy and version

Spans come from the run's folder, where the launcher writes those of all processes: they are sent after each step, and
what a collector has not taken is sent again with the next one.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from ....actors.spans import GENERATING, NAMES, NUMBERS, Span
from ...run_folder.run_directory import RunDirectory
from ..timeline.labels import label_of
from ..timeline.stored_spans import StoredSpans
from .prometheus_sink import name_and_labels
from .sink import Figures, Sink, SinkRun

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.trace import ReadableSpan

_SPANS_AT_ONCE: Final = 512
_ATTRIBUTES: Final = (*NAMES, *NUMBERS)
_TRAJECTORY: Final = ("step", "query", "trajectory")
_TURN: Final = (*_TRAJECTORY, "turn")
_PARENTS: Final = {
    "turn": "trajectory",
    "environment": "trajectory",
    "wait": "turn",
    **dict.fromkeys(GENERATING, "turn"),
    "sample": "turn",
    "optimizer": "step",
    "checkpoint": "step",
}
_IDENTITIES: Final[Mapping[str, Sequence[str]]] = {
    "trajectory": _TRAJECTORY,
    "turn": _TURN,
    "step": ("step",),
}
"""The attributes that no two parents of a kind share; their children have the same ones."""


class OpentelemetrySink(Sink):
    """Adds to what the collector has: nothing is replaced. ``endpoint``: of the collector; None: as the variables
    ``OTEL_EXPORTER_OTLP_...`` say."""

    appends_only = True

    def __init__(self, endpoint: str | None, *, spans: bool) -> None:
        self._endpoint, self._with_spans = endpoint, spans
        self._stored: StoredSpans | None = None
        self._sent = 0
        """Spans of the file that need not be sent any more."""
        self._life = ""
        self._metric_exporter: OTLPMetricExporter | None = None
        self._span_exporter: OTLPSpanExporter | None = None

    def open(self, run: SinkRun, series: str) -> tuple[str, str]:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        # The run's sink thread reports errors; the exporters' own lines would stand within the progress on the console.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        base = self._endpoint.rstrip("/") if self._endpoint else None
        self._metric_exporter = OTLPMetricExporter(endpoint=base and f"{base}/v1/metrics")
        self._span_exporter = OTLPSpanExporter(endpoint=base and f"{base}/v1/traces")
        self._resource: Resource = Resource.create({"service.name": "flexmarl", "flexmarl.run": run.name})
        if self._with_spans and self._stored is None:
            self._stored = StoredSpans(RunDirectory(run.folder).trace)
            self._sent = run.spans  # the lives before this one have sent them
        # A resumed run repeats steps: without this, their spans would have the ids of the ones before.
        self._life = self._life or f"{run.name} {time.time_ns()}"
        return (
            "",
            f"{base or 'the collector of OTEL_EXPORTER_OTLP_ENDPOINT'}, service flexmarl, run {run.name}",
        )

    def write(self, figures: Figures) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        assert self._metric_exporter is not None, "it was opened"
        if self._metric_exporter.export(self._metrics(figures)) is not MetricExportResult.SUCCESS:
            raise OSError(f"the collector has not taken the figures of step {figures.step}")
        self._send_spans()

    def close(self, failed: bool) -> None:
        assert self._metric_exporter is not None and self._span_exporter is not None, "it was opened"
        try:
            self._send_spans()
        finally:
            self._metric_exporter.shutdown()
            self._span_exporter.shutdown()  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ figures

    def _metrics(self, figures: Figures) -> "MetricsData":
        from opentelemetry.sdk.metrics.export import (
            Gauge,
            Metric,
            MetricsData,
            NumberDataPoint,
            ResourceMetrics,
            ScopeMetrics,
        )

        at_ns = _nanoseconds(figures.time_s)
        points: dict[str, list[NumberDataPoint]] = {}
        for key, value in {**figures.figures, "step": float(figures.step)}.items():
            name, labels = name_and_labels(key)
            points.setdefault(name, []).append(NumberDataPoint(dict(labels), at_ns, at_ns, float(value)))
        metrics = [Metric(name, "", "", Gauge(values)) for name, values in points.items()]
        scope = ScopeMetrics(_scope(), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    # ------------------------------------------------------------------ spans

    def _send_spans(self) -> None:
        """Raises OSError if the collector does not take them; the next call sends those again."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        assert self._span_exporter is not None, "it was opened"
        if self._stored is None:
            return
        self._stored.refresh()
        while self._sent < self._stored.size:
            numbers = range(self._sent, min(self._sent + _SPANS_AT_ONCE, self._stored.size))
            spans = [
                self._span(span, number)
                for number, span in zip(numbers, self._stored.spans(numbers), strict=True)
                if span.lane and span.begin <= span.end  # else the record is damaged
            ]
            if self._span_exporter.export(spans) is not SpanExportResult.SUCCESS:
                raise OSError(f"the collector has not taken {len(spans)} spans")
            self._sent = numbers.stop

    def _span(self, span: Span, number: int) -> "ReadableSpan":
        """``number``: the span's in the file."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags

        trace, span_id, parent_id = self._ids(span, number)

        def context(of_span: int) -> SpanContext:
            return SpanContext(trace, of_span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        return ReadableSpan(
            label_of(span),
            context(span_id),
            parent=None if parent_id is None else context(parent_id),
            resource=self._resource,
            attributes={
                f"flexmarl.{name}": value
                for name in _ATTRIBUTES
                if (value := getattr(span, name)) not in ("", -1)
            },
            start_time=_nanoseconds(span.begin),
            end_time=_nanoseconds(span.end),
            instrumentation_scope=_scope(),
        )

    def _ids(self, span: Span, number: int) -> tuple[int, int, int | None]:
        """Ids of the span's trace, of the span, and of its parent."""
        parent = _PARENTS.get(span.kind, "")
        root = _PARENTS.get(parent, parent) or span.kind
        trace = self._id(root, span, _IDENTITIES.get(root, ("policy", "version")), size=16)
        # The evaluations of a run have the same queries and no number: attributes don't distinguish their spans.
        identities = {} if span.step == -1 else _IDENTITIES
        span_id = (
            self._id(span.kind, span, identities[span.kind])
            if span.kind in identities
            else self._id(f"span {number}", span, ())
        )
        return trace, span_id, self._id(parent, span, identities[parent]) if parent in identities else None

    def _id(self, kind: str, span: Span, attributes: Sequence[str], size: int = 8) -> int:
        values = [getattr(span, name) for name in attributes]
        return int.from_bytes(blake2b(repr((self._life, kind, *values)).encode(), digest_size=size).digest())


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _scope() -> Any:
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    return InstrumentationScope("flexmarl")
