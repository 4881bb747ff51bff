from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.sampling.random import Purpose, philox4x32, uniforms

INT64 = st.integers(-(2**63), 2**63 - 1)

GOLDEN = [
    0.3990464708489645,
    0.9722412015223156,
    0.8902591729757107,
    0.4301902469608202,
    0.8544772413311855,
    0.786949448852663,
]
GOLDEN_ACCEPT = 0.11935089660821896
GOLDEN_RESAMPLE = 0.05106194362534011


def chi_square_excess(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square statistic in standard deviations above its mean."""
    degrees = len(observed) - 1
    return (((observed - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


# Known answers published with Random123, the authors' own implementation.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, answer: str) -> None:
    def words(text: str) -> np.ndarray:
        return np.array([int(word, 16) for word in text.split()], dtype=np.uint64)[:, None]

    assert np.array_equal(philox4x32(words(counter), words(key)), words(answer))


def test_golden_values() -> None:
    """A seed means the same in every version."""
    found = uniforms([0, 0, 1, -1, 2**63 - 1, 42], [0, 1, 0, 7, 2**33, 100_000], Purpose.SAMPLE).tolist()
    # The first is the first two words of the first known answer.
    assert found[0] == (0x6627E8D5E169C58D >> 11) / 2**53
    assert found == GOLDEN
    assert uniforms([42], [3], Purpose.ACCEPT)[0] == GOLDEN_ACCEPT
    assert uniforms([42], [3], Purpose.RESAMPLE)[0] == GOLDEN_RESAMPLE


@given(st.lists(st.tuples(INT64, st.integers(0, 2**40)), min_size=1, max_size=8), st.sampled_from(Purpose))
def test_a_row_is_a_function_of_its_own_arguments(rows: list[tuple[int, int]], purpose: Purpose) -> None:
    together = uniforms([seed for seed, _ in rows], [position for _, position in rows], purpose)
    alone = [uniforms([seed], [position], purpose)[0] for seed, position in rows]
    assert together.tolist() == alone
    assert all(0 <= value < 1 and (value * 2**53).is_integer() for value in alone)


AXES = {
    "positions": lambda n: uniforms([7] * n, range(n), Purpose.SAMPLE),
    "seeds": lambda n: uniforms(range(n), [0] * n, Purpose.SAMPLE),
    "high seed words": lambda n: uniforms([i << 32 for i in range(n)], [5] * n, Purpose.ACCEPT),
    "negative seeds": lambda n: uniforms(range(-n, 0), [1] * n, Purpose.SAMPLE),
}


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_uniform_and_independent(axis: str) -> None:
    n = 20_000
    values = AXES[axis](n)
    assert abs(chi_square_excess(np.histogram(values, 100, (0, 1))[0], np.full(100, n / 100))) < 4
    low_bits = (values * 2**53).astype(np.int64) & 63
    assert abs(chi_square_excess(np.bincount(low_bits, minlength=64), np.full(64, n / 64))) < 4
    for lag in (1, 2, 32):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 4 / math.sqrt(n)
    pairs = np.histogram2d(values[:-1], values[1:], 16, ((0, 1), (0, 1)))[0].ravel()
    assert abs(chi_square_excess(pairs, np.full(256, (n - 1) / 256))) < 4


def test_purposes_are_independent() -> None:
    n = 20_000
    values = [uniforms([3] * n, range(n), purpose) for purpose in Purpose]
    correlations = np.corrcoef(values)[np.triu_indices(len(Purpose), 1)]
    assert (abs(correlations) < 4 / math.sqrt(n)).all()


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 40, 63])
def test_one_seed_bit_changes_half_of_the_bits(bit: int) -> None:
    n = 500
    seeds = np.random.default_rng(bit).integers(0, 2**62, n).tolist()
    first = uniforms(seeds, [9] * n, Purpose.SAMPLE)
    second = uniforms([seed ^ (1 << bit) for seed in seeds], [9] * n, Purpose.SAMPLE)
    changed = (first * 2**53).astype(np.uint64) ^ (second * 2**53).astype(np.uint64)
    flips = np.unpackbits(changed.view(np.uint8)).sum()
    assert abs(flips - n * 53 / 2) < 5 * math.sqrt(n * 53) / 2
