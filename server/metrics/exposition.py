"""Metric families in the exposition formats, under our names, vLLM's, or both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import prometheus_client
from prometheus_client import metrics_core
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from server.metrics.names import Metric

Names = Literal["outrider", "vllm", "both"]
Instrument = prometheus_client.Counter | prometheus_client.Gauge | prometheus_client.Histogram


def instrument(metric: Metric) -> Instrument:
    """What counts for one family; it belongs to no registry, so any number of servers can live in one process."""
    labels = ("model_name", *metric.labels)
    if metric.kind == "counter":
        return prometheus_client.Counter(metric.name, metric.help, labels, registry=None)
    if metric.kind == "gauge":
        return prometheus_client.Gauge(metric.name, metric.help, labels, registry=None)
    return prometheus_client.Histogram(metric.name, metric.help, labels, registry=None, buckets=metric.buckets)


class Exposition(Collector):
    """Shows instruments and their twins, without the `_created` series."""

    def __init__(self, names: Names, instruments: Iterable[tuple[Metric, Instrument]]) -> None:
        self._names = names
        self._instruments = list(instruments)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type: text format 0.0.4, or what the Accept header asks for instead."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type

    def collect(self) -> Iterable[metrics_core.Metric]:
        """One family after the other, each followed by its twin."""
        for metric, source in self._instruments:
            for family in source.collect():
                samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                if self._names != "vllm" and not metric.name.startswith("vllm:"):
                    yield _family(family.name, family, samples)
                if self._names != "outrider" and metric.name.startswith("vllm:"):
                    yield _family(family.name, family, samples)
                if self._names != "outrider" and metric.twin is not None:
                    yield _twin(metric, metric.twin, family, samples)


def _twin(metric: Metric, name: str, family: metrics_core.Metric, samples: list[Sample]) -> metrics_core.Metric:
    base = name.removesuffix("_total") if metric.kind == "counter" else name
    renamed = [
        sample._replace(
            name=base + sample.name[len(family.name) :],
            labels={"engine": "0", **{metric.twin_labels.get(label, label): v for label, v in sample.labels.items()}},
        )
        for sample in samples
    ]
    return _family(base, family, renamed)


def _family(name: str, source: metrics_core.Metric, samples: list[Sample]) -> metrics_core.Metric:
    family = metrics_core.Metric(name, source.documentation, source.type)
    family.samples = samples
    return family
