"""Log lines for people and as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.activity import ActivityLog
from server.logs import HumanFormatter, JSONFormatter, fields, request_id, set_up_logging
from server.messages import DraftCounts, EngineStats


def record(
    message: str, *args: object, name: str = "server.x", extra: dict[str, Any] | None = None
) -> logging.LogRecord:
    return logging.getLogger(name).makeRecord(name, logging.INFO, "x.py", 1, message, args, None, extra=extra)


@pytest.fixture
def asked() -> Iterator[str]:
    token = request_id.set("r-7")
    yield "r-7"
    request_id.reset(token)


@settings(deadline=None)
@given(st.text(), st.dictionaries(st.text(), st.one_of(st.none(), st.integers(), st.text(), st.lists(st.booleans()))))
def test_json_is_one_line_whatever_is_said(text: str, said: dict[str, Any]) -> None:
    line = JSONFormatter("engine").format(record("%s", text, extra={"fields": said}))
    assert line.isascii() and "\n" not in line
    read = json.loads(line)
    assert (read["message"], read["level"], read["process"], read["logger"]) == (text, "info", "engine", "server.x")
    own = ("time", "level", "logger", "process", "message")
    assert {name: value for name, value in said.items() if name not in own}.items() <= read.items()


def test_json_tells_fields_request_and_exception(asked: str) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError as error:
        failed = logging.LogRecord("server.x", logging.ERROR, "x.py", 1, "it failed", (), (type(error), error, None))
    assert json.loads(JSONFormatter("api").format(failed))["exception"].endswith("RuntimeError: broken")
    read = json.loads(JSONFormatter("api").format(record("said", extra=fields(drafts=3))))
    assert (read["drafts"], read["request_id"]) == (3, asked)
    assert read["time"].endswith("+00:00")


def test_an_answered_request_is_taken_apart(asked: str) -> None:
    answered = ('%s - "%s %s HTTP/%s" %d', "127.0.0.1:9", "POST", "/v1/completions", "1.1", 200)
    read = json.loads(JSONFormatter("api").format(record(*answered, name="uvicorn.access")))
    assert (read["client"], read["method"], read["path"], read["status"]) == (
        "127.0.0.1:9",
        "POST",
        "/v1/completions",
        200,
    )
    assert HumanFormatter().format(record(*answered, name="uvicorn.access")).endswith('HTTP/1.1" 200 [r-7]')


def test_people_read_no_fields() -> None:
    line = HumanFormatter().format(record("said", extra=fields(drafts=3)))
    assert line.endswith("INFO    server.x: said")


def test_probes_are_not_worth_a_line() -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        set_up_logging("info")
        access = logging.getLogger("uvicorn.access")
        shown = {
            path: all(f.filter(record("%s %s %s", "c", "GET", path)) for f in access.filters)  # type: ignore[union-attr]
            for path in ("/health", "/ready", "/metrics", "/metrics?x=1", "/v1/models")
        }
    finally:
        logging.getLogger().handlers[:] = before[0]
        logging.getLogger().setLevel(before[1])
    assert [path for path, is_shown in shown.items() if is_shown] == ["/v1/models"]


def test_the_line_of_every_ten_seconds_has_its_figures_as_fields(caplog: pytest.LogCaptureFixture) -> None:
    log = ActivityLog(lambda *_: None)
    stats = EngineStats(0, 0, 0.0, 0, 0, 0, 0, {})
    log.observe(stats, 0, 100.0)
    busy = EngineStats(3, 2, 0.25, 0, 0, 0, 50, {}, DraftCounts([10, 5], [8, 1], [2, 7, 1]))
    with caplog.at_level(logging.INFO):
        log.observe(busy, 500, 105.0)
        assert not caplog.records
        log.observe(busy, 1000, 110.0)
    (line,) = caplog.records
    assert line.message == (
        "100.0 tokens/s, 3 running, 2 waiting, KV cache 25% used; "
        "10 drafts, acceptance length 1.90, by position 0.80 0.20"
    )
    assert vars(line)["fields"] == {
        "tokens_per_second": 100.0,
        "running": 3,
        "waiting": 2,
        "kv_cache_usage": 0.25,
        "drafts": 10,
        "acceptance_length": 1.9,
        "acceptance_by_position": [0.8, 0.2],
    }
