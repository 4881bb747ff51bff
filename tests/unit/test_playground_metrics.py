"""The playground reads vLLM's names where the server shows no others: they must be those that the server gives."""

from __future__ import annotations

import re
from pathlib import Path

from server.metrics import names

PAGE = Path(names.__file__).parents[1] / "api" / "pages" / "playground.html"


def test_the_playgrounds_names_of_vllm_are_the_twins_of_ours() -> None:
    page = PAGE.read_text()
    read = {
        twin: ("outrider_spec_decode_" if prefix else "") + name
        for twin, prefix, name in re.findall(r'"(vllm:\w+)": (SPEC \+ )?"(\w+)"', page)
    }
    metrics = [metric for metric in vars(names).values() if isinstance(metric, names.Metric)]
    twins = {metric.twin: metric.name for metric in metrics if metric.twin is not None}
    assert read == {twin: twins.get(twin) for twin in read} and len(read) == 7
    plain = set(re.findall(r"now\.(outrider_\w+)", page))
    spec = {"outrider_spec_decode_" + name for name in re.findall(r'since\((?:`\$\{SPEC\}|SPEC \+ ")(\w+_total)', page)}
    assert set(read.values()) == plain | spec
