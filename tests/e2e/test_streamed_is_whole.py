"""A streamed answer is the whole answer in pieces, whatever the request's fields say, with drafts and without.

The model's weights are random and its tokens are bytes and parts of words, so characters are divided between tokens and
stop strings begin in one and end in another.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from agreement import agree
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from live_server import LiveServer, Start
from tiny_checkpoint import VOCAB_SIZE

token = st.integers(0, VOCAB_SIZE - 1)
some_ids = st.lists(token, min_size=1, max_size=40)
piece = st.sampled_from(["a", "e", " ", "12", "is", "the", " of", "�", "é", "漢", "\n", "p", "zz"])

COMMON: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "min_tokens": st.integers(0, 12),
    "temperature": st.sampled_from([0, 0.5, 1, 2]),
    "top_k": st.sampled_from([-1, 1, 5, 50]),
    "top_p": st.sampled_from([0.1, 0.9, 1]),
    "min_p": st.sampled_from([0, 0.05]),
    "presence_penalty": st.sampled_from([-2, 0, 2]),
    "frequency_penalty": st.sampled_from([-2, 0, 2]),
    "repetition_penalty": st.sampled_from([0.5, 1, 1.5]),
    "logit_bias": st.dictionaries(token.map(str), st.sampled_from([-100, 3, 100]), max_size=4),
    "allowed_token_ids": st.lists(token, min_size=3, max_size=60),
    "bad_words": st.lists(piece, max_size=3),
    "stop": st.lists(st.tuples(piece, piece).map("".join) | piece, max_size=6),
    "stop_token_ids": st.lists(token, max_size=12),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
    "prompt_logprobs": st.integers(0, 3),
    "truncate_prompt_tokens": st.integers(1, 20),
    "speculative_decoding": st.booleans(),
    "structured_outputs": st.sampled_from([{"regex": "[a-e]{2,9}(12|é)"}, {"choice": ["the", "the 12", "漢字"]}]),
}
PROMPT = st.sampled_from(["The capital", "a", "漢字 🙂", ["x", "Sam has"]]) | some_ids
MESSAGES = st.sampled_from(["Hi", "漢字?", "12"]).map(lambda text: [{"role": "user", "content": text}])
COMPLETION = {
    "echo": st.booleans(),
    "logprobs": st.integers(0, 5),
}
CHAT = {"logprobs": st.booleans(), "top_logprobs": st.integers(0, 3)}
LENGTHS = {"max_tokens": st.integers(1, 40), "seed": st.integers(0, 10)}
completions = st.fixed_dictionaries({"prompt": PROMPT, **LENGTHS}, optional=COMMON | COMPLETION)
chats = st.fixed_dictionaries({"messages": MESSAGES, **LENGTHS}, optional=COMMON | CHAT)

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content")


def put_together(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream as a whole answer has them."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for delta in chunk["choices"]:
            choice = choices.setdefault(delta["index"], {"index": delta["index"], "text": "", "finish_reason": None})
            choice["text"] += delta["text"] if "text" in delta else delta["delta"].get("content", "")
            for name in ("finish_reason", "stop_reason"):
                if delta[name] is not None:
                    assert choice.get(name) is None, "said twice"
                    choice[name] = delta[name]
            for name in ("prompt_token_ids", "prompt_logprobs"):
                for holder in (delta, chunk):
                    if name in holder:
                        assert name not in choice, "said twice"
                        choice[name] = holder[name]
            if "token_ids" in delta:
                choice["token_ids"] = choice.get("token_ids", []) + delta["token_ids"]
            for name in LISTS:
                if delta["logprobs"] is not None and name in delta["logprobs"]:
                    logprobs = choice.setdefault("logprobs", {})
                    logprobs[name] = logprobs.get(name, []) + delta["logprobs"][name]
    return choices


def as_streamed(body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The choices of a whole answer in the same form."""
    return put_together(
        [
            {"choices": [choice | ({"delta": choice["message"]} if "message" in choice else {})]}
            | {name: body[name] for name in ("prompt_token_ids", "prompt_logprobs") if name in body and not i}
            for i, choice in enumerate(body["choices"])
        ]
    )


def post(server: LiveServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120, trust_env=False)


salts = count()


def compare(server: LiveServer, path: str, body: dict[str, Any]) -> bool:
    """Ask for both; False when both were refused."""
    # Each from an empty prefix cache: a prompt that is computed in other portions may round otherwise.
    whole = post(server, path, body | {"cache_salt": str(next(salts))})
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    streamed = post(server, path, body | options | {"cache_salt": str(next(salts))})
    if streamed.status_code == 400:
        assert (whole.status_code, whole.json()) == (400, streamed.json())
        return False
    assert streamed.status_code == 200, streamed.text
    events = [event for event in streamed.text.split("\n\n") if not event.startswith(":")]  # a busy machine is silent
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    if whole.status_code == 400:  # a grammar met a ban, which shows only when it comes to that
        assert chunks[-1] == whole.json()
        return False
    assert whole.status_code == 200, whole.text
    assert agree(put_together(chunks), as_streamed(whole.json())), (body, put_together(chunks), whole.json())
    usages = [chunk["usage"] for chunk in chunks]
    assert usages[-1] == whole.json()["usage"]
    so_far = [usage["completion_tokens"] for usage in usages]
    assert so_far == sorted(so_far) and so_far[-2:] == [so_far[-1]] * len(so_far[-2:])
    return True


@pytest.fixture(scope="session")
def drafting(shared: Start, tiny_folder: Path) -> LiveServer:
    """The tiny model with itself as its draft: answers come in runs of five tokens."""
    draft = ("--speculative-config.model", str(tiny_folder), "--speculative-config.num_speculative_tokens", "4")
    return shared(str(tiny_folder), "--num-kv-blocks", "1024", *draft)


@pytest.fixture(params=["plain", "drafting"])
def server(request: pytest.FixtureRequest) -> LiveServer:
    found: LiveServer = request.getfixturevalue("tiny" if request.param == "plain" else "drafting")
    return found


def check_many(server: LiveServer, examples: int) -> None:
    answered = []

    quick_to_fail = settings(phases=[Phase.explicit, Phase.generate], database=None, deadline=None)

    @settings(quick_to_fail, max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(completions.map(lambda body: ("/v1/completions", body)) | chats.map(lambda b: ("/v1/chat/completions", b)))
    def check(drawn: tuple[str, dict[str, Any]]) -> None:
        answered.append(compare(server, *drawn))

    check()
    assert answered.count(True) > examples / 3
    server.wait_for(server.is_idle)


def test_in_thirty_draws(server: LiveServer) -> None:
    check_many(server, 30)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_in_three_hundred_draws(server: LiveServer) -> None:
    check_many(server, 300)
