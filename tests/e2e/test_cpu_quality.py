"""What a CPU serves of the embedded model scores text as the same weights in float32 do."""

from __future__ import annotations

import math

import pytest

from benchmarks.cpu_quality import perplexity, text_windows

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.mark.slow
def test_perplexity_is_within_half_a_percent_of_float32() -> None:
    windows = text_windows(4096, 512)
    exact, served = (perplexity(settings, windows) for settings in ({"dtype": "float32"}, {"cpu_weights": "packed"}))
    assert math.isclose(served, exact, rel_tol=0.005), (served, exact)
