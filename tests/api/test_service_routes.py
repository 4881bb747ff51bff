from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time

import httpx
import pytest
from api_server import eventually, listen, serve_api
from fake_engine import READY, STATS
from tiny_tokenizer import byte_level

from server.api.context import ServedModel
from server.errors import UserError
from server.messages import EngineFailed, EngineOutputs, Progress, RequestOutput

OPEN_ROUTES = ("/health", "/ready", "/version", "/metrics")


async def status(http: httpx.AsyncClient, path: str) -> int:
    return (await http.get(path)).status_code


async def test_while_loading_the_process_is_alive_but_not_ready() -> None:
    """Case f2."""
    async with serve_api(ready=None) as api:
        model, api.state.model = api.state.model, None
        assert [await status(api.http, path) for path in OPEN_ROUTES] == [200, 503, 200, 200]
        for path in ("/v1/models", "/v1/server_info", "/tokenizer_info"):
            assert await status(api.http, path) == 503
        response = await api.http.post("/v1/completions", json={"prompt": "Hi"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
        assert int(response.headers["retry-after"]) > 0
        await api.engine.send(READY)
        await eventually(lambda: api.link.status == "ready")
        assert await status(api.http, "/ready") == 503
        api.state.model = model
        assert [await status(api.http, path) for path in OPEN_ROUTES] == [200] * 4
        await api.complete(prompt="Hi")


async def test_draining_refuses_new_requests_and_finishes_open_ones() -> None:
    """Case f1."""
    async with serve_api("Hello world") as api:
        api.engine.running.clear()
        open_request = asyncio.create_task(api.complete(prompt="Hi"))
        await eventually(lambda: api.link.open_sequences == 1)
        api.state.draining = True
        assert (await status(api.http, "/health"), await status(api.http, "/ready")) == (200, 503)
        response = await api.http.post("/v1/completions", json={"prompt": "Hi"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        api.engine.running.set()
        assert (await open_request)["choices"][0]["text"] == "Hello world"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_dead_engine_ends_open_requests_with_an_error(stream: bool) -> None:
    """Case e1."""
    async with serve_api("Hello world, hello there") as api:
        body = {"prompt": "Hi", "stream": stream}
        api.engine.running.clear()
        request = asyncio.create_task(api.http.post("/v1/completions", json=body))
        await eventually(lambda: api.link.open_sequences == 1)
        api.link.mark_dead("the engine process died")
        response = await request
        if stream:
            blocks = response.text.split("\n\n")
            assert blocks[-2:] == ["data: [DONE]", ""]
            error = json.loads(blocks[-3].removeprefix("data: "))["error"]
        else:
            assert response.status_code == 503
            error = response.json()["error"]
        assert "the engine process died" in error["message"]
        assert (await status(api.http, "/health"), await status(api.http, "/ready")) == (503, 503)
        assert (await api.http.post("/v1/completions", json=body)).status_code == 503
        assert [s.finish_reason for s in api.records.finished] == ["error"]
        assert api.engine.aborted == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("at_fault", "status"), [(True, 400), (False, 500)])
async def test_a_failed_step_ends_its_requests_and_no_other(stream: bool, at_fault: bool, status: int) -> None:
    async with serve_api("Hello world") as api:
        api.engine.running.clear()
        failing = asyncio.create_task(api.http.post("/v1/completions", json={"prompt": "Hi", "stream": stream}))
        await eventually(lambda: len(api.engine.requests) == 1)
        other = asyncio.create_task(api.complete(prompt="Hi"))
        await eventually(lambda: len(api.engine.requests) == 2)
        failed = api.engine.requests[0].request_id
        output = RequestOutput(failed, [], finish_reason="error", error="it failed.", request_at_fault=at_fault)
        await api.engine.send(EngineOutputs([output], STATS))
        response = await failing
        if stream:
            *_, event, done, end = response.text.split("\n\n")
            assert (response.status_code, done, end) == (200, "data: [DONE]", "")
            error = json.loads(event.removeprefix("data: "))["error"]
        else:
            assert response.status_code == status
            error = response.json()["error"]
        assert error["message"].endswith("it failed.")
        assert error["type"] == ("invalid_request_error" if at_fault else "server_error")
        api.engine.running.set()
        assert (await other)["choices"][0]["text"] == "Hello world"


async def test_a_silent_engine_is_not_healthy_until_it_speaks_again() -> None:
    """Case f4."""
    async with serve_api(engine_timeout=30.0) as api:
        api.link.last_heard = time.monotonic() - 31
        assert (await status(api.http, "/health"), await status(api.http, "/ready")) == (503, 503)
        await api.engine.send(EngineOutputs([], STATS))
        await eventually(lambda: api.link.stats is not None)
        assert await status(api.http, "/health") == 200


async def test_a_full_queue_is_said_at_once() -> None:
    async with serve_api("Hello", max_num_seqs=1, max_queued_requests=1) as api:
        api.engine.running.clear()
        waiting = [asyncio.create_task(api.complete(prompt="Hi")) for _ in range(2)]
        await eventually(lambda: api.link.open_sequences == 2)
        response = await api.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert int(response.headers["retry-after"]) > 0
        assert api.records.rejections == ["queue_full"]
        api.engine.running.set()
        await asyncio.gather(*waiting)


async def test_the_link_reports_what_the_engine_says() -> None:
    async with serve_api(ready=None) as api:
        seen: list[object] = []
        api.link._on_progress = seen.append  # the callbacks are given at construction; the app under test has none
        api.link._on_failed = seen.append
        progress, failed = Progress("weights", 1, 2), EngineFailed("no such model")
        await api.engine.send(progress)
        await api.engine.send(failed)
        await eventually(lambda: api.link.status == "dead")
        assert seen == [progress, failed]
        assert api.link.dead_reason == "no such model"
        assert "no such model" in (await api.http.get("/health")).json()["error"]["message"]


async def test_an_unreadable_message_from_the_engine_is_the_end_of_it() -> None:
    async with serve_api() as api:
        await api.engine._push.send(b"\xc1nonsense")
        await eventually(lambda: api.link.status == "dead")


async def test_errors_have_one_shape_everywhere() -> None:
    async with serve_api() as api:
        for method, path, expected in [
            ("GET", "/nowhere", 404),
            ("GET", "/v1/models/other/model", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/health", 405),
            ("POST", "/v1/models", 405),
            ("GET", "/v1/completions/", 404),
        ]:
            response = await api.http.request(method, path)
            assert response.status_code == expected
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert response.headers["x-request-id"]
        response = await api.http.post("/v1/completions", json={"prompt": "Hi", "model": "gpt-9"})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")


async def test_an_unexpected_fault_says_nothing_about_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_api() as api:
        api.link.submit = lambda *_: 1 / 0  # type: ignore[assignment,method-assign,return-value]
        response = await api.http.post("/v1/completions", json={"prompt": "Hi"})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "division" not in response.text
        assert "ZeroDivisionError" in caplog.text
        assert api.records.http[-1] == ("/v1/completions", "POST", 500)


async def test_request_ids_are_echoed_when_they_are_safe() -> None:
    async with serve_api() as api:
        for sent, echoed in [("abc-123", True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)]:
            response = await api.http.get("/health", headers={"X-Request-Id": sent.encode()})
            assert (response.headers["x-request-id"] == sent) is echoed
            assert response.headers["x-request-id"].isascii()


async def test_keys_guard_what_costs_something() -> None:
    async with serve_api(api_keys=("first", "sécond"), served_names=("tiny", "alias/two")) as api:
        guarded = ("/v1/models", "/v1/models/tiny", "/v1/server_info", "/tokenizer_info", "/v1/nothing")
        for path in guarded:
            for given in ("", "Bearer ", "Bearer wrong", "first", "Basic first"):
                response = await api.http.get(path, headers={"Authorization": given} if given else {})
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
                assert response.headers["x-request-id"]
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert (await api.http.post(path, json={"prompt": "Hi"})).status_code == 401
        for path in OPEN_ROUTES:
            assert await status(api.http, path) == 200
        # The Host header has no say in which path is meant.
        assert (await api.http.get("/v1/models", headers={"Host": "x/health?"})).status_code == 401
        for key in ("first", "sécond"):
            headers = {"Authorization": b"bearer " + key.encode()}
            response = await api.http.get("/v1/models", headers=headers)
            assert [model["id"] for model in response.json()["data"]] == ["tiny", "alias/two"]
            assert (await api.http.get("/v1/models/alias/two", headers=headers)).json()["id"] == "alias/two"
        assert set(api.records.rejections) == {"unauthorized"}


async def test_keys_guard_below_a_root_path_too() -> None:
    async with serve_api(api_keys=("k",), root_path="/llm") as api:
        for path in ("/v1/models", "/llm/v1/models"):
            assert await status(api.http, path) == 401


async def test_without_keys_an_empty_token_is_fine() -> None:
    async with serve_api() as api:
        assert (await api.http.get("/v1/models", headers={"Authorization": "Bearer "})).status_code == 200


async def test_labels_of_requests_are_templates() -> None:
    """Case d9."""
    async with serve_api() as api:
        for i in range(20):
            await api.http.get(f"/v1/models/{i}")
            await api.http.get(f"/path/{i}")
            await api.http.request(f"M{i}", "/health")
        assert {(route, method) for route, method, _ in api.records.http} == {
            ("/v1/models/{model_id:path}", "GET"),
            ("other", "GET"),
            ("/health", "other"),
        }


async def test_metrics_are_rendered_in_the_asked_format() -> None:
    async with serve_api() as api:
        response = await api.http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert response.text == "# metrics for application/openmetrics-text"
        assert response.headers["content-type"] == "text/plain; version=0.0.4"
        async with listen(api) as url, httpx.AsyncClient() as client:
            head = await client.head(f"{url}/metrics")
            assert (head.status_code, head.content) == (200, b"")


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with serve_api(files=byte_level(bos=True)) as api:
        text = "Hello 漢字 <|im_end|>"
        response = await api.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})
        body = response.json()
        assert (body["tokens"][0], body["count"], body["max_model_len"]) == (0, len(body["tokens"]), 128)
        assert body["token_strs"][0] == "<|bos|>"
        bare = (await api.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()["tokens"]
        assert bare == body["tokens"][1:]
        response = await api.http.post("/detokenize", json={"tokens": bare})
        assert response.json() == {"prompt": text}
        chat = await api.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})
        await api.chat(messages=[{"role": "user", "content": "Hi"}])
        assert chat.json()["tokens"] == api.engine.requests[0].prompt_token_ids
        assert (await api.http.post("/tokenize", json={"prompt": ""})).json()["tokens"] == [0]
        for path, wrong in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": []}),
            ("/detokenize", {}),
            ("/detokenize", {"tokens": [400]}),
            ("/detokenize", {"tokens": [-1]}),
        ):
            assert (await api.http.post(path, json=wrong)).status_code == 400
        info = (await api.http.get("/tokenizer_info")).json()
        assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|bos|>")


async def test_server_info_shows_what_was_read_back() -> None:
    async with serve_api() as api:
        rows = (await api.http.get("/v1/server_info")).json()["rows"]
        assert rows[0]["resolved"] == "torch"


@pytest.mark.parametrize(("path", "reads"), [("/docs", 'fetch("openapi.json")'), ("/", 'fetch("metrics")')])
async def test_a_page_needs_nothing_from_elsewhere(path: str, reads: str) -> None:
    async with serve_api(api_keys=("secret",)) as api:
        response = await api.http.get(path)  # without a key: a page holds no secrets, and asks for one
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/html")
        assert "://" not in response.text and reads in response.text
        policy = response.headers["content-security-policy"]
        (script,) = re.findall(r"<script>(.*?)</script>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


async def test_the_playground_can_be_left_out() -> None:
    async with serve_api(playground=False) as api:
        assert (await api.http.get("/")).status_code == 404
        assert (await api.http.get("/docs")).status_code == 200


async def test_unknown_fields_of_small_endpoints_are_named_too() -> None:
    async with serve_api() as api:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            assert "x-outrider-ignored-fields" not in (await api.http.post(path, json=body)).headers
            response = await api.http.post(path, json={**body, "zeta": 1, "alpha": None, "beta": {}})
            assert response.headers["x-outrider-ignored-fields"] == "beta, zeta"


async def test_the_openapi_document_describes_the_answers() -> None:
    """Of every route: what succeeds, and that keys are needed where they are."""
    async with serve_api(api_keys=("k",)) as api:
        document = (await api.http.get("/openapi.json")).json()
        for path, item in document["paths"].items():
            for route in item.values():
                assert route["summary"] and route["responses"]["200"]["content"]
                is_guarded = path.startswith(("/v1/", "/tokenize", "/detokenize"))
                assert ("401" in route["responses"], "security" in route) == (is_guarded, is_guarded)
    async with serve_api() as api:
        document = (await api.http.get("/openapi.json")).json()
        assert not any("security" in route for item in document["paths"].values() for route in item.values())


async def test_the_openapi_document_describes_the_bodies() -> None:
    async with serve_api() as api:
        document = (await api.http.get("/openapi.json")).json()
        post = document["paths"]["/v1/completions"]["post"]
        parts = post["requestBody"]["content"]["application/json"]["schema"]["allOf"]
        assert {"prompt", "temperature", "stream"} <= {name for part in parts for name in part["properties"]}
        routes = [route for item in document["paths"].values() for route in item.values()]
        assert all("422" not in route["responses"] for route in routes)


def test_a_generation_config_that_no_request_could_ask_for_stops_the_start() -> None:
    for config in ({"temperature": -1}, {"top_k": 1.5}, {"top_p": "x"}, {"min_p": True}, {"repetition_penalty": 0}):
        with pytest.raises(UserError, match=next(iter(config))):
            ServedModel(byte_level(), config)
