"""Greedy answers of a crowded server in fp32: each is its solo run, and what transformers gives.

Crowded: 32 requests at once, a KV pool for a few of them, chunks of few tokens, prompts that share beginnings.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from live_server import LiveServer, Start
from oracle import Oracle, folder_oracle
from tiny_checkpoint import VOCAB_SIZE

from server.checkpoint.locate import locate
from server.checkpoint.tokenizer import load_tokenizer

AT_ONCE = 32
logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    """English text as the embedded model's tokens."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    return load_tokenizer(locate(None)).tokenizer.encode(text, add_special_tokens=False).ids


async def ask_all(server: LiveServer, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        async with gate:
            response = await client.post("/v1/completions", json={**body, "return_token_ids": True})
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids

    async with server.client() as client:
        return await asyncio.gather(*(ask(prompt) for prompt in prompts))


def solo(server: LiveServer, number: int, prompt: list[int], max_tokens: int) -> list[int]:
    """Alone in the engine, with nothing of it in the prefix cache."""
    return server.token_ids(prompt, max_tokens=max_tokens, ignore_eos=True, cache_salt=f"solo {number}")


def assert_right(oracle: Oracle, prompt: list[int], output: list[int], what: str) -> bool:
    """Fail unless it is the oracle's greedy answer; False when a near tie makes it another one."""
    misses = oracle.misses(prompt, output)
    for miss in misses:
        logger.warning("%s, prompt of %d tokens: %s", what, len(prompt), miss)
    assert all(miss.is_near_tie for miss in misses), f"{what}, prompt of {len(prompt)} tokens: {misses}"
    return not misses


async def check_parity(
    server: LiveServer, oracle: Oracle, prompts: list[list[int]], max_tokens: int, solos: int | None = None
) -> None:
    """All prompts at once, then the first `solos` alone."""
    preempted, hits = server.metric("outrider_preemptions_total"), server.metric("outrider_prefix_cache_hits_total")
    outputs = await ask_all(server, prompts, max_tokens)
    assert server.metric("outrider_preemptions_total") > preempted
    assert server.metric("outrider_prefix_cache_hits_total") > hits
    certain = [assert_right(oracle, prompt, output, "crowded") for prompt, output in zip(prompts, outputs, strict=True)]
    assert {len(output) for output in outputs} == {max_tokens}
    for number, prompt in enumerate(prompts[:solos]):
        alone = solo(server, number, prompt, max_tokens)
        if certain[number]:
            assert alone == outputs[number] or not assert_right(oracle, prompt, alone, "solo")
        else:
            assert_right(oracle, prompt, alone, "solo")
    assert server.wait_for(server.is_idle)


def tiny_prompts(count: int, longest: int) -> list[list[int]]:
    """Random ids: alone, after a beginning that others share, or as blocks that others hold in another order."""
    draw = random.Random(7)

    def ids(length: int) -> list[int]:
        return [draw.randrange(VOCAB_SIZE) for _ in range(length)]

    stem, tiles = ids(24), [ids(16) for _ in range(3)]
    edges = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65]
    lengths = [*edges, *(draw.randint(1, longest) for _ in range(count - len(edges)))]
    kinds: list[Callable[[int], list[int]]] = [
        ids,
        lambda length: [*stem, *ids(length)][:length],
        lambda length: [token for _ in range(-(-length // 16)) for token in draw.choice(tiles)][:length],
    ]
    return [kinds[i % 3](length) for i, length in enumerate(lengths)]


async def test_a_crowd_on_a_tiny_model(tiny_crowded: LiveServer, tiny_folder: Path) -> None:
    oracle = folder_oracle(tiny_folder)
    await check_parity(tiny_crowded, oracle, tiny_prompts(64, 400), max_tokens=24)


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 160])
def test_a_prompt_asked_again_comes_from_the_cache_with_the_same_answer(length: int, tiny: LiveServer) -> None:
    """Case b21: of a prompt that ends with its last block, one token is computed again."""
    prompt = [(length * 31 + 7 * i) % VOCAB_SIZE for i in range(length)]
    body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answers = [tiny.complete(prompt, **body) for _ in range(3)]
    others = tiny.complete(prompt, **body, cache_salt="others")
    assert all(answer["choices"] == answers[0]["choices"] for answer in (*answers, others))
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (*answers, others)]
    again = length - 1 if length % 16 == 0 else length // 16 * 16
    assert cached == [0, again, again, 0]


def text_prompts(text_ids: list[int], lengths: list[int]) -> list[list[int]]:
    """Pieces of the text; every second one starts where others do."""
    starts = [0 if i % 2 else 37 * i % 1000 for i in range(len(lengths))]
    return [text_ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


async def test_a_crowd_on_the_embedded_model(smollm2: LiveServer, smollm2_oracle: Oracle, text_ids: list[int]) -> None:
    lengths = [1, 2, 15, 16, 17, 33, 48, 31, 60, 64, 61, 29, 47, 32, 14, 62, 13, 45, 30, 12, 28, 61, 46, 130]
    prompts = text_prompts(text_ids, lengths)
    await check_parity(smollm2, smollm2_oracle, prompts, max_tokens=7, solos=4)


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_two_hundred_requests_on_the_embedded_model(
    start: Start, smollm2_oracle: Oracle, text_ids: list[int]
) -> None:
    sizes = ("--num-kv-blocks", "46", "--max-num-batched-tokens", "128", "--max-num-seqs", "32")
    server = start("--dtype", "float32", *sizes).ready()
    draw = random.Random(11)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 699, 700]
    lengths += [draw.choice((draw.randint(1, 100), draw.randint(1, 700))) for _ in range(200 - len(lengths))]
    draw.shuffle(lengths)
    prompts = text_prompts(text_ids, lengths)
    await check_parity(server, smollm2_oracle, prompts, max_tokens=16)
    for prompt in prompts[:10]:
        expected = smollm2_oracle.generate(prompt, 16)
        output = server.token_ids(prompt, max_tokens=16, ignore_eos=True)
        assert output == expected or not assert_right(smollm2_oracle, prompt, output, "generate")
