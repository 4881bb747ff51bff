"""The pool under any sequence of operations: every block is accounted for, and prefixes stay what they were."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.kv.block_pool import BlockPool


def test_block_zero_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.take(3)) == [1, 2, 3]
    with pytest.raises(MemoryError):
        pool.take(1)


def test_a_released_prefix_is_found_until_its_block_is_taken() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.remember(blocks[0], b"a")
    pool.release(blocks)
    assert pool.find(b"a") == blocks[0]
    # The two blocks that hold nothing go first.
    others = pool.take(2)
    assert blocks[0] not in others
    assert pool.find(b"a") == blocks[0]
    assert pool.take(1) == [blocks[0]]
    assert pool.find(b"a") is None


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.remember(first, b"first")
    pool.remember(second, b"second")
    pool.release([first])
    pool.release([second])
    pool.share([first])
    pool.release([first])
    assert pool.take(1) == [second]


def test_sharing_keeps_a_block_until_the_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block])
    assert pool.free == 1
    pool.release([block])
    assert pool.free == 2


def test_usage_counts_held_blocks_only() -> None:
    pool = BlockPool(5)
    assert pool.usage == 0
    held = pool.take(1)
    assert pool.usage == 0.25
    pool.remember(held[0], b"x")
    pool.release(held)
    assert pool.usage == 0


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(RuntimeError, match="0 holders, 1 references"):
        pool.check([])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("takes share release remember".split()), st.integers(0, 9)), max_size=60))
def test_any_history_leaves_every_block_accounted_for(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    held: list[list[int]] = []
    names = 0
    for operation, number in operations:
        if operation == "takes" and number <= pool.free:
            held.append(pool.take(number))
        elif operation == "share" and held:
            blocks = list(held[number % len(held)])
            pool.share(blocks)
            held.append(blocks)
        elif operation == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif operation == "remember" and held and held[number % len(held)]:
            names += 1
            block = held[number % len(held)][0]
            pool.remember(block, str(names).encode())
        pool.check(held)
        assert pool.free + len({b for blocks in held for b in blocks}) == pool.usable
