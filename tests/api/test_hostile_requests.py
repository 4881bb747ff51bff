"""Requests that must be refused at once, by name, without reaching the engine."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from api_server import Api, serve_api
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PATHS = ("/v1/completions", "/v1/chat/completions")
INF, NAN = float("inf"), float("nan")

NUMBERS: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "1", True, INF, NAN, 10**400, [], {}],
    "top_p": [0, -1, 1.1, "1", NAN],
    "min_p": [-0.1, 1.1, "0"],
    "top_k": [-2, 1.5, "5", True, 2**63],
    "repetition_penalty": [0, 5e-324, -1, 11, INF],
    "presence_penalty": [-2.1, 2.1, False],
    "frequency_penalty": [-2.1, 2.1, "x"],
    "n": [0, -1, 129, 10**30, 1.0, "2", True],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True],
    "max_tokens": [-1, 2**31, 2**63, 10**30, 1.5, "5", True, 1000],
    "min_tokens": [-1, 2**40, "1", 20],
    "prompt_logprobs": [-1, 21, True, "1"],
    "priority": [2**40, "x", 1],
    "truncate_prompt_tokens": [0, -1, "x"],
    "stop_token_ids": [[-1], [400], [2**63], ["x"], 5, [True]],
    "allowed_token_ids": [[], [-1], [400], [10**30]],
    "bad_words": [[""], "x", [5]],
    "ignore_eos": [1, "true", []],
    "stream": ["true", 1],
    "skip_special_tokens": ["no"],
    "include_stop_str_in_output": [0],
    "return_token_ids": [1],
    "cache_salt": [5, "x" * 300],
    "model": [5, []],
    "metrics": ["yes"],
    "add_special_tokens": [1],
    "guided_json": [{}],
    "structured_outputs": [{"regex": "(((("}],
    "use_beam_search": [True],
}
COMPLETIONS_ONLY: dict[str, list[Any]] = {
    "suffix": ["x"],
    "best_of": [2, 0, "x"],
    "logprobs": [-1, 21, True, "1"],
    "echo": [1, "true"],
}


def full(path: str) -> dict[str, Any]:
    prompt = {"prompt": "Hi"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "Hi"}]}
    return {**prompt, "max_tokens": 8}


async def post(api: Api, path: str, body: Any, **headers: str) -> Any:
    # Python's own encoder: it writes NaN and Infinity, as careless clients do.
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await api.http.post(path, content=content, headers={"content-type": "application/json", **headers})


async def test_bad_values_are_refused_by_name() -> None:
    """Case e5."""
    async with serve_api() as api:
        for path in PATHS:
            table = NUMBERS | (COMPLETIONS_ONLY if path == PATHS[0] else {})
            for field, values in table.items():
                for value in values:
                    response = await post(api, path, {**full(path), field: value})
                    error = response.json()["error"]
                    assert response.status_code == 400, (field, value, response.text)
                    assert re.split(r"[.\[]", error["param"])[0] == field, (value, error)
                    assert set(error) == {"message", "type", "param", "code"}
                    assert "Error" not in error["message"]
        assert api.engine.requests == []
        assert set(api.records.rejections) == {"invalid"}
        assert (await api.complete(prompt="Hi"))["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_text_that_is_no_text_is_refused(stream: bytes) -> None:
    """Case e6."""
    async with serve_api() as api:
        for prompt in (b'"\\ud800"', b'"\xff\xfe"', b'["ok", "\\udfff"]'):
            response = await post(api, PATHS[0], b'{"prompt": ' + prompt + b', "stream": ' + stream + b"}")
            assert response.status_code == 400
            assert response.headers["content-type"] == "application/json"
        assert api.engine.requests == []


async def test_bodies_have_a_size_a_type_and_a_depth() -> None:
    async with serve_api() as api:

        async def endless() -> Any:
            for _ in range(40):
                yield b" " * 1024 * 1024

        for path in (*PATHS, "/tokenize", "/detokenize"):
            assert (await post(api, path, b"[" * 100_000)).status_code == 400
            assert (await post(api, path, b"")).status_code == 400
            for name, value in [
                ("content-type", "text/plain"),
                ("content-type", "application/json; charset=utf-16"),
                ("content-encoding", "gzip"),
            ]:
                assert (await post(api, path, b"{}", **{name: value})).status_code == 415
        large = await api.http.post(PATHS[0], content=b" " * (33 * 1024 * 1024))
        unannounced = await api.http.post(PATHS[0], content=endless())
        for response in (large, unannounced):
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_large_body_within_the_limit_is_read() -> None:
    async with serve_api() as api:
        response = await post(api, PATHS[0], {"prompt": [[1] * 100_000] * 3})
        assert response.json()["error"]["code"] == "context_length_exceeded"
        response = await post(api, PATHS[0], {"prompt": [1] * 300_000, "truncate_prompt_tokens": 5, "max_tokens": 1})
        assert response.status_code == 200
        assert api.engine.requests[0].prompt_token_ids == [1] * 5


async def test_no_request_may_ask_for_more_than_could_ever_run() -> None:
    async with serve_api(max_num_seqs=4, max_queued_requests=2) as api:
        response = await post(api, PATHS[0], {"prompt": ["Hi"] * 4, "n": 2})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    async with serve_api() as api:
        assert (await post(api, PATHS[0], {"prompt": ["Hi"] * 1000, "n": 100})).status_code == 400
        assert api.engine.requests == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
fields = st.sampled_from([*NUMBERS, *COMPLETIONS_ONLY, "prompt", "messages", "stop", "logit_bias", "stream_options"])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(fields, json_values, max_size=4), min_size=1, max_size=5))
async def test_any_values_get_an_answer_or_a_refusal(bodies: list[dict[str, Any]]) -> None:
    async with serve_api() as api:
        for values in bodies:
            for path in PATHS:
                response = await post(api, path, {**full(path), **values})
                assert response.status_code in (200, 400, 404), response.text
                if response.status_code != 200:
                    assert response.json()["error"]["message"]
