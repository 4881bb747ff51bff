"""/metrics as text: Prometheus 0.0.4 or OpenMetrics 1.0.0, under our names, vLLM's, or both.

An endpoint picker scrapes every 50 ms on the event loop that also streams tokens. So all that does not change, which
is everything but the numbers, is made into text once; a client library would escape and sort labels each time.
Formats: https://prometheus.io/docs/instrumenting/exposition_formats/ and https://prometheus.io/docs/specs/om/.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from server.metrics.instruments import Family, Instrument
from server.metrics.names import Metric

Names = Literal["outrider", "vllm", "both"]

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Exposition:
    """Renders families. All series carry the label `model_name`."""

    def __init__(self, model_name: str, names: Names, families: Iterable[Family[Instrument]]) -> None:
        self._shown: list[_Shown] = []
        for family in families:
            metric = family.metric
            is_vllm = metric.name.startswith("vllm:")
            if names != ("outrider" if is_vllm else "vllm"):
                self._shown.append(_Shown(family, metric.name, {"model_name": model_name}, {}))
            if metric.twin is not None and names != "outrider":
                constant = {"engine": "0", "model_name": model_name}
                for name in (metric.twin, *metric.earlier_twins):
                    self._shown.append(_Shown(family, name, constant, metric.twin_labels))

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics when the Accept header asks for it, else the text format."""
        openmetrics = "application/openmetrics-text" in accept
        lines: list[str] = []
        for shown in self._shown:
            shown.render(lines, openmetrics=openmetrics)
        lines.append("# EOF\n" if openmetrics else "")
        return "\n".join(lines).encode(), OPENMETRICS if openmetrics else TEXT


class _Shown:
    """A family under one of its names."""

    def __init__(
        self, family: Family[Instrument], name: str, constant: Mapping[str, str], renamed: Mapping[str, str]
    ) -> None:
        metric = family.metric
        self._family = family
        self._name = name
        self._constant = constant
        self._labels = [renamed.get(label, label) for label in metric.labels]
        self._starts: dict[tuple[str, ...], tuple[Instrument, list[str]]] = {}
        self._headers = {
            False: _header(metric, name),
            True: _header(metric, name.removesuffix("_total") if metric.kind == "counter" else name),
        }

    def render(self, lines: list[str], *, openmetrics: bool) -> None:
        """Append the family's lines."""
        lines += self._headers[openmetrics]
        for values, instrument in self._family.items():
            known, starts = self._starts.get(values, (None, []))
            if known is not instrument:
                starts = self._make_starts(values, instrument.buckets)
                self._starts[values] = instrument, starts
            lines += [start + repr(float(value)) for start, value in zip(starts, instrument.values(), strict=True)]

    def _make_starts(self, values: tuple[str, ...], bounds: Sequence[float]) -> list[str]:
        """What stands before the number in each series of one set of label values."""
        labels = {**self._constant, **dict(zip(self._labels, values, strict=True))}
        metric = self._family.metric
        if metric.kind != "histogram":
            return [_series(self._name, labels)]
        texts = [repr(float(bound)) for bound in bounds] + ["+Inf"]
        buckets = [_series(self._name + "_bucket", {**labels, "le": text}) for text in texts]
        return [*buckets, _series(self._name + "_count", labels), _series(self._name + "_sum", labels)]


def _header(metric: Metric, name: str) -> list[str]:
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return [f"# HELP {name} {text}", f"# TYPE {name} {metric.kind}"]


def _series(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{label}="{_escape(value)}"' for label, value in labels.items())
    return f"{name}{{{pairs}}} "


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
