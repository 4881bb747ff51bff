from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from api_server import Api, eventually, serve_api
from tiny_tokenizer import byte_level

from server.messages import EngineRequest

ANSWER = "The answer is 42, 漢字 and 🙂."


def events(response: httpx.Response) -> list[Any]:
    """The objects of a stream, without the [DONE] that must end it."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


async def stream(api: Api, **body: Any) -> list[Any]:
    response = await api.http.post("/v1/completions", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return events(response)


async def test_echo_with_logprobs_lines_up_with_the_text() -> None:
    """Case a1."""
    async with serve_api(ANSWER) as api:
        for prompt in ("\n7) Sam has 12", api.encode("漢字 naïve <think>")[:-1], "<|im_start|>user\n🙂"):
            body = await api.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=5)
            choice = body["choices"][0]
            logprobs = choice["logprobs"]
            assert "".join(logprobs["tokens"]) == choice["text"]
            starts = [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
            assert logprobs["text_offset"] == starts
            assert logprobs["token_logprobs"][0] is None
            assert logprobs["top_logprobs"][0] is None
            assert None not in logprobs["token_logprobs"][1:]
            assert len(logprobs["tokens"]) == body["usage"]["total_tokens"]
            if isinstance(prompt, str):
                assert choice["text"].startswith(prompt)


async def test_scoring_a_prompt_generates_nothing() -> None:
    """Case a3."""
    async with serve_api(ANSWER) as api:
        ids = api.encode("The answer of the world")
        body = await api.complete(prompt=[ids], echo=True, logprobs=5, max_tokens=0)
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("The answer of the world", "length")
        lists = choice["logprobs"]
        assert {key: len(lists[key]) for key in lists} == dict.fromkeys(
            ("tokens", "token_logprobs", "top_logprobs", "text_offset"), len(ids)
        )
        assert body["usage"]["completion_tokens"] == 0
        assert api.engine.requests[0].params.prompt_logprobs == 5


async def test_lm_eval_finds_one_generated_token_and_the_actual_token_among_the_best() -> None:
    async with serve_api(ANSWER) as api:
        ids = api.encode("The answer")
        body = await api.complete(prompt=[ids], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
        logprobs = body["choices"][0]["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(ids) + 1
        for token, logprob, top in zip(
            logprobs["tokens"][1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
        ):
            assert top[token] == logprob
            assert len(top) == 2


async def test_bytes_of_a_divided_character_tell_the_alternatives_apart() -> None:
    async with serve_api("🙂") as api:
        body = await api.complete(prompt="Hi", logprobs=2, max_tokens=8, ignore_eos=True)
        for token, top in zip(api.encode("🙂"), body["choices"][0]["logprobs"]["top_logprobs"], strict=False):
            piece = byte_level().tokenizer.id_to_token(token)
            assert len(top) == 2
            assert piece is not None
            assert any(key.startswith("bytes:\\x") for key in top)


async def test_stream_is_the_whole_answer_in_pieces() -> None:
    async with serve_api(ANSWER) as api:
        common = {"prompt": "Hi", "max_tokens": 30, "logprobs": 2, "return_token_ids": True, "seed": 7}
        for extra in ({}, {"stop": ["42", "字 a"]}, {"echo": True, "prompt_logprobs": 1}, {"n": 3}):
            whole = await api.complete(**common, **extra)
            chunks = await stream(api, **common, **extra)
            for choice in whole["choices"]:
                pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
                assert "".join(piece["text"] for piece in pieces) == choice["text"]
                assert sum((piece["token_ids"] for piece in pieces), []) == choice["token_ids"]
                for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    assert sum((piece["logprobs"][key] for piece in pieces), []) == choice["logprobs"][key]
                reasons = [piece["finish_reason"] for piece in pieces]
                assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
                assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
                assert pieces[0].get("prompt_logprobs") == choice.get("prompt_logprobs")
            assert all(chunk["id"] == chunks[0]["id"] for chunk in chunks)


@pytest.mark.parametrize("burst", [1, 5])
async def test_every_stop_string_across_a_token_edge_cuts_stream_and_whole_alike(burst: int) -> None:
    """Cases a6 and b6."""
    text = "The answer is 42. What is it?"
    async with serve_api(text) as api:
        api.engine.burst = burst
        for start in range(0, len(text) - 4, 3):
            stop = text[start : start + 4]
            expected = text[: text.index(stop)]
            body = {"prompt": "Hi", "max_tokens": 30, "stop": stop, "logprobs": 0}
            whole = await api.complete(**body)
            choice = whole["choices"][0]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
            assert "".join(choice["logprobs"]["tokens"]) == expected
            assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]
            chunks = await stream(api, **body)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        # the engine is told once per request that did not end by itself
        await eventually(lambda: api.engine.open_requests == 0)
        assert len(api.engine.aborted) == len({tuple(ids) for ids in api.engine.aborted})


@pytest.mark.parametrize("stop", [[""], ["a", ""], ["x"] * 17, 5, [5], {"a": 1}, ["x" * 5000]])
async def test_impossible_stop_strings_are_refused(stop: Any) -> None:
    """Case a8."""
    async with serve_api() as api:
        response = await api.http.post("/v1/completions", json={"prompt": "Hi", "stop": stop})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stop")


@pytest.mark.parametrize("stop", [None, [], "zzz", ["a" * 3] * 16])
async def test_harmless_stop_strings_are_accepted(stop: Any) -> None:
    async with serve_api("Hello") as api:
        assert (await api.complete(prompt="Hi", stop=stop))["choices"][0]["text"] == "Hello"


async def test_min_tokens_holds_against_stop_strings() -> None:
    """Case a10."""
    async with serve_api("the the the the the the the the") as api:
        body = await api.complete(prompt="Hi", stop=["the"], min_tokens=10, max_tokens=20, ignore_eos=True)
        assert body["usage"]["completion_tokens"] >= 10
        assert body["choices"][0]["finish_reason"] == "stop"


async def test_usage_in_streams_only_when_asked_for() -> None:
    """Case a14."""
    async with serve_api("Hello world") as api:
        plain = await stream(api, prompt="Hi")
        assert all("usage" not in chunk and chunk["choices"] for chunk in plain)
        counted = await stream(api, prompt="Hi", stream_options={"include_usage": True})
        assert all(chunk["usage"] is None for chunk in counted[:-1])
        assert counted[-1]["choices"] == []
        whole = await api.complete(prompt="Hi")
        assert counted[-1]["usage"] == whole["usage"]
        options = {"include_usage": True, "continuous_usage_stats": True}
        steady = await stream(api, prompt="Hi", stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in steady]
        assert counts == sorted(counts)
        assert counts[-1] == whole["usage"]["completion_tokens"]
        response = await api.http.post("/v1/completions", json={"prompt": "Hi", "stream_options": options})
        assert response.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["fine", ""], [[1], []], None, 5, {}, [1, "a"], ["a", 1], [1.5], [True], [[1], "a"], [[[1]]]],
)
async def test_empty_and_odd_prompts_are_refused_and_harm_nobody(prompt: Any) -> None:
    """Case a16."""
    async with serve_api("Hello") as api:
        response = await api.http.post("/v1/completions", json={"prompt": prompt})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        assert api.engine.requests == []
        assert (await api.complete(prompt="Hi"))["choices"][0]["text"] == "Hello"


async def test_token_ids_and_text_are_the_same_prompt() -> None:
    """Case a17."""
    async with serve_api("Hello") as api:
        ids = api.encode("Sam has 12")
        await api.complete(prompt="Sam has 12")
        await api.complete(prompt=ids)
        await api.complete(prompt=[ids])
        await api.complete(prompt=[0])
        assert [request.prompt_token_ids for request in api.engine.requests] == [ids, ids, ids, [0]]
        for wrong in (-1, 400, 2**31, 2**63, 10**30):
            response = await api.http.post("/v1/completions", json={"prompt": [1, wrong]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def test_choices_are_sorted_by_prompt_and_number() -> None:
    """Case a18."""
    prompts = [f"{i}) Sam has" for i in range(8)]
    words = ["Hello", " world", " the", " answer", " of", " Sam", " has", " and"]

    def script(request: EngineRequest) -> list[int]:
        text = byte_level().tokenizer.decode(request.prompt_token_ids)
        # Later prompts are shorter, so that they end first.
        number = int(text[0])
        return [*byte_level().tokenizer.encode(words[number] * (9 - number)).ids, 2]

    async with serve_api(script) as api:
        body = await api.complete(prompt=prompts, n=2, max_tokens=50)
        assert [choice["index"] for choice in body["choices"]] == list(range(16))
        for i, word in enumerate(words):
            assert [choice["text"] for choice in body["choices"][2 * i : 2 * i + 2]] == [word * (9 - i)] * 2
        assert body["usage"]["prompt_tokens"] == sum(len(api.encode(prompt)) for prompt in prompts)
        seeds = [request.params.seed for request in api.engine.requests]
        assert len(set(seeds)) == 16


async def test_the_first_choice_of_a_seed_does_not_depend_on_n() -> None:
    async with serve_api() as api:
        await api.complete(prompt="Hi", seed=-5, n=3)
        await api.complete(prompt="Hi", seed=-5)
        seeds = [request.params.seed for request in api.engine.requests]
        assert seeds[0] == seeds[3] == -5
        assert len(set(seeds[:3])) == 3


async def test_logit_bias_is_checked_against_the_vocabulary() -> None:
    """Case a19."""
    wrong_ids: list[Any] = [{"400": 1}, {"-1": 1}, {"1.0": 1}, {"a": 1}, {"9" * 30: 1}]
    wrong_values: list[Any] = [{"5": 101}, {"5": "x"}, {"5": True}, {"5": None}, [1], "x"]
    async with serve_api() as api:
        for bias in wrong_ids + wrong_values:
            response = await api.http.post("/v1/completions", json={"prompt": "Hi", "logit_bias": bias})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")
        await api.complete(prompt="Hi", logit_bias={"7": -100, "399": 100})
        assert [request.params.logit_bias for request in api.engine.requests] == [{7: -100.0, 399: 100.0}]


@pytest.mark.parametrize(
    ("length", "max_tokens", "generated"),
    [
        (126, None, 2),
        (127, None, 1),
        (128, None, None),
        (129, None, None),
        (127, 1, 1),
        (128, 1, None),
        (126, 1000, None),
        (120, 8, 8),
        (120, 9, None),
    ],
)
async def test_the_context_limit_names_its_numbers(length: int, max_tokens: int | None, generated: int | None) -> None:
    """Case a21; the context length is 128."""
    async with serve_api("the the the the the the the the") as api:
        body = {"prompt": [5] * length, "max_tokens": max_tokens, "ignore_eos": True}
        response = await api.http.post("/v1/completions", json=body)
        if generated is None:
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == ("prompt" if length >= 128 else "max_tokens")
            assert str(length) in error["message"]
            assert "128" in error["message"]
        else:
            assert response.json()["usage"]["completion_tokens"] == generated


async def test_a_text_that_cannot_fit_is_refused_without_tokenising() -> None:
    async with serve_api() as api:
        response = await api.http.post("/v1/completions", json={"prompt": "a" * 3_000_000})
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_defaults_come_from_the_model_and_yield_to_the_request() -> None:
    """Case a24."""
    config = {"top_k": 7, "repetition_penalty": 1.3, "temperature": 0.6, "do_sample": True, "max_new_tokens": 3}
    async with serve_api(generation_config=config) as api:
        await api.complete(prompt="Hi")
        await api.complete(prompt="Hi", top_k=0, temperature=0, repetition_penalty=1, max_tokens=2)
        first, second = (request.params for request in api.engine.requests)
        assert (first.top_k, first.repetition_penalty, first.temperature, first.top_p) == (7, 1.3, 0.6, 1.0)
        assert (second.top_k, second.repetition_penalty, second.temperature, second.max_tokens) == (0, 1.0, 0.0, 2)


async def test_what_the_engine_gets_is_complete() -> None:
    async with serve_api(max_num_seqs=4, priority_scheduling=True) as api:
        await api.complete(
            prompt="Hi",
            max_tokens=9,
            min_tokens=2,
            top_p=0.5,
            min_p=0.1,
            presence_penalty=-1,
            frequency_penalty=2,
            stop_token_ids=[5, 2],
            allowed_token_ids=[9, 5, 9],
            bad_words=["Hello"],
            logprobs=3,
            priority=-3,
            cache_salt="mine",
            unknown_field=1,
        )
        request = api.engine.requests[0]
        params = request.params
        assert (request.priority, request.cache_salt) == (-3, "mine")
        assert (params.max_tokens, params.min_tokens, params.logprobs, params.prompt_logprobs) == (9, 2, 3, None)
        assert (params.top_p, params.min_p, params.presence_penalty, params.frequency_penalty) == (0.5, 0.1, -1.0, 2.0)
        assert (params.stop_token_ids, params.allowed_token_ids) == ((2, 5), (9, 5))
        assert tuple(api.encode("Hello")) in params.bad_words


async def test_unknown_fields_are_named_in_a_header() -> None:
    async with serve_api() as api:
        body = {"prompt": "Hi", "zebra": 1, "apple": None, "banana": {}, "user": "me", "bad name": 1}
        response = await api.http.post("/v1/completions", json=body)
        assert response.headers["x-outrider-ignored-fields"] == "banana, zebra"


async def test_metrics_count_what_was_delivered() -> None:
    async with serve_api("The answer is 42. What is it?") as api:
        api.engine.burst = 4
        total = 0
        for stop in (None, "42", "wh"):
            body = await api.complete(prompt="Hi", n=2, stop=stop, max_tokens=9)
            total += body["usage"]["completion_tokens"]
        records = api.records
        assert records.generated == total == sum(s.generation_tokens for s in records.finished)
        assert records.prompt == 3 * len(api.encode("Hi"))
        assert sum(count for _, count in records.intervals) == total - 6
        assert len(records.first_tokens) == 6
        spent = sum(seconds * count for seconds, count in records.intervals)
        assert spent == pytest.approx(sum(s.decode_seconds or 0 for s in records.finished))
        assert all(s.queue_seconds == pytest.approx(0.0001, rel=1e-3) for s in records.finished)


async def test_timings_come_with_the_answer_when_asked_for() -> None:
    async with serve_api() as api:
        whole = await api.complete(prompt="Hi", metrics=True)
        chunks = await stream(api, prompt="Hi", metrics=True, stream_options={"include_usage": True})
        bare = await stream(api, prompt="Hi", metrics=True)
        for body in (whole, chunks[-1], bare[-1]):
            timings = body["metrics"]["timings"]
            assert 0 <= timings["queue_seconds"] <= timings["total_seconds"]
        assert all("metrics" not in chunk for chunk in [*chunks[:-1], *bare[:-1]])


async def test_cached_tokens_are_reported() -> None:
    async with serve_api() as api:
        api.engine.cached_tokens = 2
        body = await api.complete(prompt=["Hi there", "Hello"], n=2)
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
