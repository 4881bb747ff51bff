from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.api.stop import StopMatcher

texts = st.text(alphabet="ab", max_size=30)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stop_strings: list[str]) -> tuple[int, str] | None:
    """(end, stop) by trying every end in turn."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def feed(text: str, stop_strings: list[str], cuts: list[int]) -> tuple[int, str] | None:
    matcher = StopMatcher(stop_strings)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in zip(edges, edges[1:], strict=False):
        match = matcher.feed(text[start:end])
        if match is not None:
            return start + match.end, match.stop
    return None


@given(texts, stops, st.lists(st.integers(0, 30), max_size=6))
def test_the_match_that_ends_first_wins_wherever_the_text_is_cut(
    text: str, stop_strings: list[str], cuts: list[int]
) -> None:
    assert feed(text, stop_strings, cuts) == first_match(text, stop_strings)


@given(texts, stops)
def test_held_is_the_longest_possible_beginning(text: str, stop_strings: list[str]) -> None:
    matcher = StopMatcher(stop_strings)
    if matcher.feed(text) is not None:
        return
    beginnings = [length for stop in stop_strings for length in range(1, len(stop)) if text.endswith(stop[:length])]
    assert matcher.held == max(beginnings, default=0)


def test_a_match_that_does_not_count_yet_is_passed_over_but_may_begin_a_later_one() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.feed("aa", counts=False) is None
    match = matcher.feed("a")
    assert match is not None
    assert (match.stop, match.end) == ("aa", 1)
