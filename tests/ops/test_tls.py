"""HTTPS, with certificates made for the test."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from tokenizers import Tokenizer, models

from server.config import Settings
from server.errors import UserError
from server.tls import tls_context


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of PEM files: the server's chain and key, both in one, the authority, a client's."""
    folder = tmp_path_factory.mktemp("tls")
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("someone@example.org")
    blobs = {
        "chain": b"".join(blob.bytes() for blob in server.cert_chain_pems),
        "key": server.private_key_pem.bytes(),
        "both": server.private_key_and_cert_chain_pem.bytes(),
        "authority": authority.cert_pem.bytes(),
        "client": client.private_key_and_cert_chain_pem.bytes(),
        "other_key": client.private_key_pem.bytes(),
        "text": b"no certificate",
    }
    for name, blob in blobs.items():
        (folder / name).write_bytes(blob)
    return {name: str(folder / name) for name in blobs}


@pytest.fixture
def url(files: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """A server that asks for a client's certificate, and loads for ever."""
    (tmp_path / "model").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "eos_token_id": 0}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "model" / "tokenizer.json"))
    program = str(Path(__file__).with_name("scripted_server.py"))
    engine = ("--pids", str(tmp_path / "pids"), "--load-seconds", "1000")
    tls = ("--ssl-certfile", files["chain"], "--ssl-keyfile", files["key"], "--ssl-ca-certs", files["authority"])
    process = subprocess.Popen(
        [sys.executable, program, *engine, "--", str(tmp_path / "model"), "--port", "0", *tls],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "https://127.0.0.1:" in line, line + process.stderr.read()
    yield next(word for word in line.split() if word.startswith("https://"))
    process.kill()
    process.wait()
    process.stderr.close()


def test_only_clients_of_the_authority_get_in(url: str, authority: trustme.CA, files: dict[str, str]) -> None:
    known = ssl.create_default_context()
    authority.configure_trust(known)
    with httpx.Client(verify=known, trust_env=False) as client, pytest.raises(httpx.TransportError):
        client.get(url + "/health", timeout=20)
    known.load_cert_chain(files["client"])
    with httpx.Client(verify=known, trust_env=False) as client:
        assert client.get(url + "/health", timeout=20).status_code == 200
    with httpx.Client(trust_env=False) as stranger, pytest.raises(httpx.ConnectError, match="certificate"):
        stranger.get(url + "/health", timeout=20)


def context(**paths: str) -> ssl.SSLContext | None:
    return tls_context(Settings(**{f"ssl_{name}": path for name, path in paths.items()}))


def test_key_and_certificate_may_share_a_file(files: dict[str, str]) -> None:
    assert context() is None
    found = context(certfile=files["both"])
    assert found is not None and found.verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ({"certfile": "/nowhere.pem"}, "--ssl-certfile /nowhere.pem: cannot be read: No such file"),
        ({"certfile": "text"}, "it holds no certificate with its private key"),
        ({"certfile": "chain"}, "it holds no certificate with its private key"),
        ({"certfile": "chain", "keyfile": "other_key"}, "it holds no certificate with its private key"),
        ({"certfile": "both", "ca_certs": "text"}, "it holds no certificates of authorities"),
        ({"certfile": "both", "ca_certs": "/nowhere.pem"}, "--ssl-ca-certs /nowhere.pem: cannot be read"),
    ],
)
def test_wrong_files_stop_the_start_by_name(paths: dict[str, str], message: str, files: dict[str, str]) -> None:
    with pytest.raises(UserError, match=message):
        context(**{name: files.get(path, path) for name, path in paths.items()})
