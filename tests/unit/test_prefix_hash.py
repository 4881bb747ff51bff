"""Names of blocks: equal exactly for equal prefixes under the same salt."""

from hypothesis import given
from hypothesis import strategies as st

from server.engine.kv.prefix import block_hash, root_hash

TOKENS = st.lists(st.integers(0, 2**31), min_size=1, max_size=8)


@given(TOKENS, TOKENS)
def test_names_differ_with_any_token(a: list[int], b: list[int]) -> None:
    root = root_hash("")
    assert (block_hash(root, a) == block_hash(root, b)) == (a == b)


@given(st.text(max_size=5), st.text(max_size=5), TOKENS)
def test_salts_share_nothing(a: str, b: str, tokens: list[int]) -> None:
    assert (block_hash(root_hash(a), tokens) == block_hash(root_hash(b), tokens)) == (a == b)


def test_the_parent_is_part_of_the_name() -> None:
    root = root_hash("")
    assert block_hash(block_hash(root, [1]), [2]) != block_hash(block_hash(root, [3]), [2])


def test_the_name_is_stable_over_processes() -> None:
    assert block_hash(root_hash("s"), [1, 2, 3]).hex()[:16] == "9bf26bbd6f8806b2"
