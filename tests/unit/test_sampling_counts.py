from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from server.engine.sampling.counts import TokenCounts

TOKENS = st.lists(st.integers(0, 11), max_size=12)
"""10 and 11 are outside the vocabulary."""


def as_dict(counts: TokenCounts, output: list[int], draft: list[int]) -> tuple[dict[int, int], set[int]]:
    found = counts.follow(output, draft)
    assert len(set(found.ids.tolist())) == len(found.ids) == len(found.generated) == len(found.present)
    generated = dict(zip(found.ids.tolist(), found.generated.tolist(), strict=True))
    return {token: n for token, n in generated.items() if n}, set(found.ids[found.present].tolist())


@given(st.sets(st.integers(0, 9)), st.lists(st.tuples(TOKENS, TOKENS), max_size=8))
def test_any_sequence_of_histories(prompt: set[int], histories: list[tuple[list[int], list[int]]]) -> None:
    counts = TokenCounts(np.array(sorted(prompt), dtype=np.int64), 10)
    for output, draft in histories:
        generated, present = as_dict(counts, output, draft)
        inside = [token for token in output + draft if token < 10]
        assert generated == Counter(inside)
        assert present == prompt | set(inside)


def test_rejected_drafts_leave_nothing_behind() -> None:
    counts = TokenCounts(np.empty(0, dtype=np.int64), 10)
    output = [5] * 3000
    for length in range(5):
        assert as_dict(counts, output, [1, 2, 3, 4][:length])[0] == Counter(output + [1, 2, 3, 4][:length])
    output += [1, 9]
    assert as_dict(counts, output, [])[0] == {5: 3000, 1: 1, 9: 1}
    assert as_dict(counts, output[:-1] + [5], [])[0] == {5: 3001, 1: 1}
    assert as_dict(counts, [7], [])[0] == {7: 1}


def test_a_snapshot_stays_as_it_was() -> None:
    counts = TokenCounts(np.array([3]), 1000)
    first = counts.follow([1, 2])
    counts.follow([1, 2], [1, 1, *range(100, 300)])
    assert first.ids.tolist() == [3, 1, 2]
    assert first.generated.tolist() == [0, 1, 1]
    assert first.present.tolist() == [True, True, True]


def test_any_sequence_type_is_an_output() -> None:
    counts = TokenCounts(np.empty(0, dtype=np.int64), 10)
    assert as_dict(counts, (1, 2, 2), ())[0] == {1: 1, 2: 2}
    assert as_dict(counts, [1, 2, 2, 3], ())[0] == {1: 1, 2: 2, 3: 1}
