"""What a request is told about its drafts, and that tokens of one step are still counted one by one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_server import Api, eventually, serve_api
from fake_engine import READY
from msgspec.structs import replace

from server.api.schemas.sampling import MOST_DRAFTED
from server.messages import EngineRequest, KVGroup, LoadedModel, ResolvedRow, SamplingParams, SpeculativeInfo
from server.spec.settings import MAX_DRAFT_TOKENS

K = 4
SPECULATES = replace(
    READY,
    rows=[
        ResolvedRow("target", "moe", "torch_int4", "torch_int4", "explicit", "asked for"),
        ResolvedRow("draft", "moe", "auto", "grouped_mm", "auto", "the preferred one"),
    ],
    kv_groups=[KVGroup(0, 128, 64, 1000, 31)],
    models=[LoadedModel("draft", "Glm4MoeMTP", 5, "ab", "mtp")],
    speculative=SpeculativeInfo("mtp", K, adaptive=False, synthetic=False),
)
NONE = {
    "mean_acceptance_length": None,
    "draft_acceptance_rate": None,
    "acceptance_histogram": [0] * (K + 1),
    "num_spec_steps": 0,
    "num_accepted_draft_tokens": 0,
    "num_draft_tokens": 0,
    "num_spec_tokens": K,
}


def forever(_: object) -> list[int]:
    return [40, 41, 42]


async def ask(api: Api, *, burst: int = 3, **body: Any) -> dict[str, Any]:
    api.engine.burst, api.engine.k = burst, K
    return await api.complete(prompt="Hi", ignore_eos=True, metrics=True, **body)


async def test_the_figures_of_a_request() -> None:
    async with serve_api(forever, ready=SPECULATES) as api:
        body = await ask(
            api, max_tokens=9
        )  # 1 without a draft, then 3, 3 and 2, whose draft of 1 ends with the request
        assert body["metrics"]["speculative_decoding"] == {
            "mean_acceptance_length": pytest.approx(1 + 5 / 3),
            "draft_acceptance_rate": pytest.approx(5 / 9),
            "acceptance_histogram": [0, 1, 2, 0, 0],
            "num_spec_steps": 3,
            "num_accepted_draft_tokens": 5,
            "num_draft_tokens": 9,
            "num_spec_tokens": K,
        }
        assert body["metrics"]["timings"]["total_seconds"] > 0


async def test_choices_are_counted_together() -> None:
    async with serve_api(forever, ready=SPECULATES) as api:
        figures = (await ask(api, max_tokens=7, n=3))["metrics"]["speculative_decoding"]
        assert figures["acceptance_histogram"] == [0, 0, 6, 0, 0]
        assert figures["num_spec_steps"] == 6


async def test_steps_that_a_slow_reader_gets_merged_are_counted_apart() -> None:
    async with serve_api(forever, ready=SPECULATES) as api:
        api.engine.burst, api.engine.k = 5, K
        request = EngineRequest(api.link.next_request_id(), [1, 2], SamplingParams(max_tokens=61, seed=0), 0.0)
        stream = api.link.submit(request)
        await eventually(lambda: api.link.open_sequences == 0)
        (merged,) = [output async for output in stream]
        assert (len(merged.token_ids), merged.drafted, merged.accepted) == (61, 48, 48)
        assert (stream.drafts.drafted, stream.drafts.accepted, stream.drafts.lengths) == (48, 48, [0, 0, 0, 0, 12])


@pytest.mark.parametrize("include_usage", [True, False])
async def test_a_stream_carries_them_once_at_its_end(include_usage: bool) -> None:
    async with serve_api(forever, ready=SPECULATES) as api:
        api.engine.burst, api.engine.k = 3, K
        body = {"prompt": "Hi", "max_tokens": 9, "ignore_eos": True, "metrics": True, "stream": True}
        if include_usage:
            body["stream_options"] = {"include_usage": True}
        response = await api.http.post("/v1/completions", json=body)
        chunks = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
        assert [i for i, chunk in enumerate(chunks) if "metrics" in chunk] == [len(chunks) - 1]
        assert bool(chunks[-1]["choices"]) != include_usage
        assert chunks[-1]["metrics"]["speculative_decoding"]["acceptance_histogram"] == [0, 1, 2, 0, 0]


async def test_without_drafts_the_figures_are_zeros_and_nulls() -> None:
    async with serve_api(forever, ready=SPECULATES) as api:
        body = await ask(api, max_tokens=9, speculative_decoding=False)
        assert body["metrics"]["speculative_decoding"] == NONE
        assert body["usage"]["completion_tokens"] == 9
        assert (await ask(api, max_tokens=1))["metrics"]["speculative_decoding"] == NONE
        assert [request.params.most_drafted for request in api.engine.requests] == [0, None]


async def test_a_server_that_does_not_speculate_says_null_and_takes_the_field() -> None:
    async with serve_api("Hello") as api:
        for wish in (True, False):
            body = await api.complete(prompt="Hi", metrics=True, speculative_decoding=wish)
            assert body["metrics"]["speculative_decoding"] is None


async def test_the_field_is_strict_and_documented() -> None:
    async with serve_api("Hello") as api:
        for wrong in ("no", 0, {"k": 1}):
            response = await api.http.post("/v1/completions", json={"prompt": "Hi", "speculative_decoding": wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "speculative_decoding")
        document = (await api.http.get("/openapi.json")).json()
        for path in ("/v1/completions", "/v1/chat/completions"):
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            fields = {name: field for part in schema["allOf"] for name, field in part["properties"].items()}
            assert "without drafts" in fields["speculative_decoding"]["description"]


async def test_a_request_may_lower_k_and_not_raise_it() -> None:
    async with serve_api(forever, ready=SPECULATES) as api:
        for most in (0, 1, K):
            await ask(api, max_tokens=9, speculative={"num_speculative_tokens": most})
        assert [request.params.most_drafted for request in api.engine.requests] == [0, 1, K]
        for wrong in (K + 1, -1, 17, True, "1", None):
            body = {"prompt": "Hi", "speculative": {"num_speculative_tokens": wrong}}
            response = await api.http.post("/v1/completions", json=body)
            assert response.status_code == 400, wrong
            assert response.json()["error"]["param"] == "speculative.num_speculative_tokens"
    async with serve_api("Hello") as api:
        body = {"prompt": "Hi", "speculative": {"num_speculative_tokens": 1}}
        response = await api.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert "0 tokens that this server drafts" in response.json()["error"]["message"]


def test_the_bound_of_the_field_is_that_of_the_setting() -> None:
    assert MOST_DRAFTED == MAX_DRAFT_TOKENS


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_each_token_says_where_in_a_draft_it_stood(path: str) -> None:
    """The first step drafts nothing; each later one's draft has all but its last token."""
    prompt = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    wanted = [None, 0, 1, None, 0, 1, None, 0, None]
    async with serve_api(forever, ready=SPECULATES) as api:
        api.engine.burst, api.engine.k = 3, K
        body = {**prompt, "max_tokens": 9, "ignore_eos": True, "return_draft_positions": True, "return_token_ids": True}
        whole = (await api.http.post(path, json=body)).json()["choices"][0]
        assert whole["draft_positions"] == wanted
        assert len(whole["token_ids"]) == len(wanted)
        response = await api.http.post(path, json={**body, "stream": True})
        chunks = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
        assert [place for chunk in chunks for place in chunk["choices"][0].get("draft_positions", [])] == wanted
        silent = (await api.http.post(path, json={**prompt, "max_tokens": 3})).json()["choices"][0]
        assert "draft_positions" not in silent


@pytest.mark.parametrize(("burst", "max_tokens"), [(1, 101), (5, 101), (5, 7), (3, 2), (5, 1)])
async def test_tokens_of_one_step_are_one_sample_each(burst: int, max_tokens: int) -> None:
    """Case d3: as many samples as tokens after the first, and their sum is the decode time."""
    async with serve_api(forever, ready=SPECULATES) as api:
        await ask(api, burst=burst, max_tokens=max_tokens)
        samples = sum(count for _, count in api.records.intervals)
        (finished,) = api.records.finished
        assert samples == max_tokens - 1 == finished.generation_tokens - 1
        total = sum(seconds * count for seconds, count in api.records.intervals)
        assert total == pytest.approx(finished.decode_seconds)


async def test_server_info_shows_both_roles_the_drafts_and_the_pages() -> None:
    async with serve_api(ready=SPECULATES) as api:
        info = (await api.http.get("/v1/server_info")).json()
        assert [(row["role"], row["resolved"]) for row in info["rows"]] == [
            ("target", "torch_int4"),
            ("draft", "grouped_mm"),
        ]
        assert info["speculative"] == {
            "method": "mtp",
            "num_speculative_tokens": K,
            "adaptive": False,
            "synthetic": False,
            "draft_sample_method": "greedy",
        }
        assert info["kv_groups"][0]["kernel_page_size"] == 64
        assert info["models"][0]["method"] == "mtp"
    async with serve_api() as api:
        assert (await api.http.get("/v1/server_info")).json()["speculative"] is None
