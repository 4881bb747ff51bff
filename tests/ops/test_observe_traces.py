"""Spans of a live server with drafts, received in this process."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.live_server import LiveServer
from tests.e2e.tiny_checkpoint import write_tiny_llama
from tests.ops.otlp_receiver import OTLPReceiver, ReceivedSpan

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SERVER = 2
"""The kind of a span that answers a request."""
ERROR = 2
"""The status of one that failed."""


@dataclass(frozen=True)
class Traced:
    receiver: OTLPReceiver
    server: LiveServer

    def spans_of(self, body: dict[str, object], path: str = "/v1/completions", **headers: str) -> list[ReceivedSpan]:
        """The spans that a request leaves, the request's own first."""
        before = len(self.receiver.spans)
        httpx.post(self.server.url + path, json=body, headers=headers, timeout=60, trust_env=False)
        self.receiver.wait_for(before + 1)
        time.sleep(0.1)  # those of one request are sent together, unless the batch was just full
        return sorted(self.receiver.spans[before:], key=lambda span: (span.kind != SERVER, span.start_ns))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("traced") / "tiny")


@pytest.fixture(scope="module")
def traced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with ExitStack() as stack:
        receiver = OTLPReceiver()
        stack.callback(receiver.close)
        flags = ("--num-kv-blocks", "200", "--served-model-name", "m", "--otlp-traces-endpoint", receiver.url)
        flags += ("--speculative-config.method", "draft_model", "--speculative-config.model", str(model))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
            server = LiveServer(tmp_path_factory.mktemp("server"), str(model), *flags)
        stack.callback(server.kill)
        yield Traced(receiver, server.ready())


def test_a_span_says_what_was_asked_and_what_became_of_it(traced: Traced) -> None:
    body: dict[str, object] = {
        "prompt": [1, 2, 3],
        "max_tokens": 20,
        "temperature": 0.5,
        "top_k": 7,
        "ignore_eos": True,
    }
    began = time.time_ns()
    span, *children = traced.spans_of(body, **{"x-request-id": "asked-1"})
    assert (span.name, span.kind, span.parent, span.status, span.service) == (
        "text_completion m",
        SERVER,
        "",
        0,
        "outrider",
    )
    said = span.attributes
    assert {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.response.finish_reasons": ["length"],
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "outrider.request_id": "asked-1",
    }.items() <= said.items()
    assert said["outrider.speculation.drafts"] > 0
    accepted = said["outrider.speculation.accepted_tokens"] / said["outrider.speculation.drafts"]
    assert said["outrider.speculation.acceptance_length"] == pytest.approx(1 + accepted)
    # One after the other, within the request.
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    assert {(child.trace, child.parent) for child in children} == {(span.trace, span.id)}
    moments = [began - 10**9, span.start_ns]
    for child in children:
        moments += [child.start_ns, child.end_ns]
    moments += [span.end_ns, time.time_ns()]
    slack = 2 * 10**6  # two clocks, read one after the other
    assert all(later >= earlier - slack for earlier, later in zip(moments, moments[1:], strict=False))
    assert 0 < said["gen_ai.response.time_to_first_chunk"] <= (span.end_ns - span.start_ns) / 1e9


def test_the_callers_trace_is_taken_over(traced: Traced) -> None:
    body: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "n": 2, "stream": True}
    span, *children = traced.spans_of(body, "/v1/chat/completions", traceparent=f"00-{TRACE}-{CALLER}-01")
    assert (span.name, span.trace, span.parent) == ("chat m", TRACE, CALLER)
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert len(span.attributes["gen_ai.response.finish_reasons"]) == 2
    assert {child.trace for child in children} == {TRACE}


def test_a_caller_who_does_not_sample_leaves_no_span(traced: Traced) -> None:
    before = len(traced.receiver.spans)
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
    body = {"prompt": [1], "max_tokens": 2}
    httpx.post(traced.server.url + "/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
    assert len(traced.spans_of(body)) >= 1
    assert [span.name for span in traced.receiver.spans[before:]].count("text_completion m") == 1


@pytest.mark.parametrize("given", ["nonsense", "00-" + "0" * 32 + "-" + CALLER + "-01", "ff-" + "f" * 2000])
def test_a_malformed_trace_begins_a_new_one(given: str, traced: Traced) -> None:
    span = traced.spans_of({"prompt": [1], "max_tokens": 2}, traceparent=given)[0]
    assert span.parent == "" and int(span.trace, 16)


def test_a_refused_request_has_a_span_without_children(traced: Traced) -> None:
    spans = traced.spans_of({"prompt": [1], "max_tokens": -5})
    assert [span.name for span in spans] == ["text_completion m"]
    assert spans[0].attributes["http.response.status_code"] == 400
    assert spans[0].status == 0  # the client's fault, not the server's
    assert "gen_ai.usage.input_tokens" not in spans[0].attributes


def test_nothing_that_a_client_wrote_is_in_a_span(traced: Traced) -> None:
    body: dict[str, object] = {"prompt": "my secret", "stop": ["secret"], "user": "secret", "max_tokens": 3}
    assert "secret" not in repr(traced.spans_of(body))


def test_probes_leave_no_spans(traced: Traced) -> None:
    before = len(traced.receiver.spans)
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert traced.server.status(path) == 200
    traced.spans_of({"prompt": [1], "max_tokens": 1})
    assert {span.name for span in traced.receiver.spans[before:]} <= {"text_completion m", "queue", "prefill", "decode"}


def test_a_collector_that_is_not_there_holds_nobody_up(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        server = LiveServer(tmp_path, str(model), "--num-kv-blocks", "100", "--otlp-traces-endpoint", url).ready()
        try:
            for _ in range(3):
                assert server.complete([1, 2], max_tokens=3)["usage"]["completion_tokens"] == 3
            server.process.terminate()
            assert server.exit_code() == 0
        finally:
            server.kill()
