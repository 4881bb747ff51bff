"""Settings come from flags, variables, the file and the defaults, in this order; mistakes name what is right."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.config import Settings, flag_name, flag_of
from server.config_faults import UsageError
from server.flags import config_yaml, parse_serve, serve_parser
from server.sizes import format_size, parse_size


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("OUTRIDER_"):
            monkeypatch.delenv(name)


def resolved(*flags: str) -> Settings:
    return parse_serve(flags).settings


def error(*flags: str) -> str:
    with pytest.raises(UsageError) as caught:
        resolved(*flags)
    return str(caught.value)


@pytest.mark.parametrize(
    "sources", [c for n in range(4) for c in itertools.combinations(("flag", "variable", "file"), n)]
)
def test_the_strongest_source_wins(sources: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"flag": 1001, "variable": 1002, "file": 1003}
    flags = ["--max-num-seqs", "1001"] if "flag" in sources else []
    if "variable" in sources:
        monkeypatch.setenv("OUTRIDER_MAX_NUM_SEQS", "1002")
    if "file" in sources:
        (tmp_path / "c.yaml").write_text("max_num_seqs: 1003\n")
        flags += ["--config", str(tmp_path / "c.yaml")]
    assert resolved(*flags).max_num_seqs == (values[sources[0]] if sources else 128)


def test_each_source_keeps_what_a_stronger_one_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text("model: from-file\nport: 1\nseed: 3\n")
    monkeypatch.setenv("OUTRIDER_PORT", "2")
    monkeypatch.setenv("OUTRIDER_CONFIG", str(tmp_path / "c.yaml"))
    settings = resolved("--host", "0.0.0.0")
    assert (settings.model, settings.port, settings.seed, settings.host) == ("from-file", 2, 3, "0.0.0.0")


@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_every_setting_is_a_flag_a_variable_and_a_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = {
        "block_size": "32",
        "kv_cache_memory": "2GiB",
        "gpu_memory_utilization": "0.5",
        "tensor_parallel_size": "1",
        "root_path": "/x",
        "attention_backend": "torch",
        "moe_backend": "auto",
        "kv_cache_dtype": "bfloat16",
        "speculative": '{"method": "ngram"}',
        "device": "cpu",
        "dtype": "float32",
        "load_format": "dummy",
        "generation_config": "none",
        "tool_call_parser": "hermes",
        "reasoning_parser": "think",
        "scheduling_policy": "priority",
        "cpu_threads": "2",
        "cpu_weights": "packed",
        "log_level": "debug",
        "log_format": "json",
        "otlp_traces_endpoint": "http://collector:4318",
        "metrics_names": "vllm",
        "enforce_eager": "true",
        "playground": "false",
        "enable_prefix_caching": "false",
        "enable_chunked_prefill": "false",
        "allowed_origins": "https://chat.example",
    }
    needs = {
        "max_inflight_per_key": "api_key",
        "ssl_keyfile": "ssl_certfile",
        "ssl_ca_certs": "ssl_certfile",
    }
    if name in needs:
        monkeypatch.setenv("OUTRIDER_" + needs[name].upper(), "7")
    text = special.get(name, "7")
    if Settings.model_fields[name].annotation is bool:
        flags = [flag_name(name) if text == "true" else "--no-" + flag_name(name)[2:]]
    else:
        flags = [text] if flag_of(name).positional else [flag_name(name), text]
    by_flag = resolved(*flags)
    monkeypatch.setenv("OUTRIDER_" + name.upper(), text)
    by_variable = resolved()
    monkeypatch.delenv("OUTRIDER_" + name.upper())
    is_text = isinstance(getattr(by_flag, name), str | tuple) and name != "speculative"
    (tmp_path / "c.yaml").write_text(f"{name.replace('_', '-')}: {f'{text!r}' if is_text else text}\n")
    by_key = resolved("--config", str(tmp_path / "c.yaml"))
    assert by_flag == by_variable == by_key
    if name != "tensor_parallel_size":  # only its default is possible
        assert by_flag != Settings()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-inflight-per-key", "3"], "give --api-key, too"),
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile is of use only with --ssl-certfile"),
        (["--ssl-ca-certs", "c.pem"], "--ssl-ca-certs is of use only with --ssl-certfile"),
        (["--allowed-origins", "chat.example"], "such as https://chat.example"),
        (["--allowed-origins", "https://chat.example/page"], "such as https://chat.example"),
        (["--sse-keep-alive", "-1"], "must be greater than or equal to 0"),
        (["--send-timeout", "0"], "must be greater than 0"),
        (["--max-num-seq", "3"], "did you mean --max-num-seqs?"),
        (["--max_model_len=3"], "did you mean --max-model-len?"),
        (["--enable-prefix-cachin"], "did you mean --enable-prefix-caching?"),
        (["--zzz"], "unknown flag --zzz"),
        (["--model", "m"], "outrider serve MODEL"),
        (["a", "b"], "unexpected argument 'b'"),
        (["--port"], "--port"),
        (["--block-size", "17"], "--block-size 17: must be a multiple of 16"),
        (["--port", "70000"], "--port 70000: must be less than or equal to 65535"),
        (["--port", "-1"], "--port -1: must be greater than or equal to 0"),
        (["--max-num-batched-tokens", "0"], "must be greater than or equal to 1"),
        (["--max-model-len", "long"], "must be a whole number"),
        (["--drain-timeout", "inf"], "must be a finite number"),
        (["--kv-cache-memory", "2Gx"], "KiB, MiB, GiB"),
        (["--kv-cache-memory", "lots"], "such as 2GiB"),
        (["--kv-cache-memory", "0"], "at least one byte"),
        (["--kv-cache-memory", "1GiB", "--num-kv-blocks", "3"], "exclude each other"),
        (["--tensor-parallel-size", "2"], "must be 1"),
        (["--moe-backend", "flash"], "must be auto or one of torch, grouped_mm"),
        (["--dtype", "int8"], "'bfloat16'"),
        (["--root-path", "x"], "must begin with /"),
        (["--served-model-name", ""], "must not be empty"),
    ],
)
def test_a_wrong_flag_is_explained(flags: list[str], message: str) -> None:
    assert message in error(*flags)


def test_all_wrong_values_are_named_at_once() -> None:
    message = error("--port", "x", "--seed", "-1")
    assert "--port x" in message and "--seed -1" in message


def test_a_wrong_variable_is_named_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_BLOCK_SIZE", "17")
    assert error().startswith("OUTRIDER_BLOCK_SIZE=17: must be a multiple of 16")
    monkeypatch.delenv("OUTRIDER_BLOCK_SIZE")
    monkeypatch.setenv("OUTRIDER_BLOKC_SIZE", "16")
    assert "did you mean OUTRIDER_BLOCK_SIZE?" in error()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OUTRIDER_PORT", "tcp://10.96.0.7:8000"),
        ("OUTRIDER_SERVICE_HOST", "10.96.0.7"),
        ("OUTRIDER_SERVICE_PORT", "8000"),
        ("OUTRIDER_SERVICE_PORT_HTTP", "8000"),
        ("OUTRIDER_PORT_8000_TCP", "tcp://10.96.0.7:8000"),
        ("OUTRIDER_PORT_8000_TCP_ADDR", "10.96.0.7"),
        ("OUTRIDER_METRICS_SERVICE_HOST", "10.96.0.7"),
        ("OUTRIDER_METRICS_PORT", "tcp://10.96.0.7:9090"),
    ],
)
def test_a_service_link_is_refused_with_the_way_out(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    message = error()
    assert name in message and "enableServiceLinks: false" in message


def test_an_empty_variable_is_unset_but_an_empty_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_MAX_MODEL_LEN", "")
    assert resolved().max_model_len is None
    monkeypatch.setenv("OUTRIDER_API_KEY", "")
    assert "without authentication" in error()


@pytest.mark.parametrize("text", ["a,b", '["a", "b"]', " a , b "])
def test_several_api_keys_in_one_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", text)
    assert resolved().api_key == ("a", "b")
    assert resolved("--api-key", "x", "--api-key", "y,z").api_key == ("x", "y,z")


def test_a_bad_api_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "s3cret,,other")
    assert "s3cret" not in error() and "OUTRIDER_API_KEY" in error()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nmax-model-le: 2\n", "line 2: unknown key 'max-model-le'; did you mean max_model_len?"),
        ("port: 1\nport: 2\n", "line 2: port is given twice"),
        ("port: true\n", "--port takes no true"),
        ("seed: [1]\n", "seed: [1]: must be a whole number"),
        ("- port\n", "must be a mapping"),
        ("port: {\n", "is not YAML"),
        ("api_key: [12]\n", "put quotes around it"),
    ],
)
def test_a_wrong_file_is_explained(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert message in error("--config", str(tmp_path / "c.yaml"))


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    assert "cannot be read" in error("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["m", "--kv-cache-memory", "1.5GB", "--no-enable-prefix-caching", "--served-model-name", "yes", "--seed", "7"],
        ["o'x: #y", "--max-model-len", "4096", "--attention-backend", "TORCH_SDPA", "--root-path", "/a", "--port", "0"],
    ],
)
def test_print_config_is_taken_back(flags: list[str], tmp_path: Path) -> None:
    settings = resolved(*flags)
    (tmp_path / "c.yaml").write_text(config_yaml(settings))
    assert resolved("--config", str(tmp_path / "c.yaml")) == settings


def test_print_config_keeps_api_keys_to_itself(tmp_path: Path) -> None:
    text = config_yaml(resolved("--api-key", "s3cret"))
    assert "s3cret" not in text and "api_key: 1 given" in text
    (tmp_path / "c.yaml").write_text(text)
    assert resolved("--config", str(tmp_path / "c.yaml"), "--api-key", "s3cret").api_key == ("s3cret",)


def test_the_engine_reads_the_tree_without_looking_at_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = resolved("--kv-cache-memory", "2GiB", "--moe-backend", "auto")
    monkeypatch.setenv("OUTRIDER_PORT", "9")
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_help_names_every_flag_with_its_default() -> None:
    text = serve_parser().format_help()
    for name in Settings.model_fields:
        assert (flag_of(name).metavar if flag_of(name).positional else flag_name(name)) in text
    assert text.count("[default:") == len(Settings.model_fields)


def test_the_settings_import_neither_torch_nor_the_sources() -> None:
    code = (
        "import server.config, sys; print([m for m in ('torch', 'pydantic_settings', 'fastapi') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@given(st.integers(min_value=1, max_value=2**60))
def test_a_printed_size_is_the_same_size(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("512MiB", 2**29), ("1.5GB", 1_500_000_000), ("4k", 4096), ("17", 17), (" 1 kb ", 1000), (5, 5)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size
