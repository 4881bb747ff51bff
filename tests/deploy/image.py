"""The CPU image: built by buildah on mmdebstrap's Debian and run by crun, as in the field but without a registry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.deploy_tools import ROOT, TOOLS, tool

GIVEN = os.environ.get("DEPLOY_IMAGE")
"""An image that buildah has already, to be tested as it is."""
IMAGE, BASE = GIVEN or "localhost/outrider:cpu", "localhost/debian:bookworm"
BASE_TAR = TOOLS.parent / "debian-bookworm.tar"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PATIENCE = 240
"""Seconds after which a wait gives up."""
SUPPORTED_CGROUPS = "umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec crun "
"""crun wants version 2 alone, which a machine that has both can show to it."""


def buildah(*arguments: str, timeout: float = 1500) -> str:
    """Run buildah, without a daemon and without privileges beyond root's; what it prints."""
    environment = {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot", **os.environ}
    done = subprocess.run(
        [tool("buildah"), *arguments], capture_output=True, text=True, check=False, timeout=timeout, env=environment
    )
    assert done.returncode == 0, f"buildah {arguments[0]}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


def build() -> None:
    """Build the image as `docker build` would; only where base and torch come from differs."""
    _make_base()
    if not list((ROOT / "deploy" / "wheels").glob("torch-*+cpu-*.whl")):
        subprocess.run(["make", "deploy/wheels/.torch", f"PYTHON={sys.executable}"], cwd=ROOT, check=True, timeout=600)
    arguments = {"VARIANT": "cpu", "CPU_BASE_IMAGE": BASE, "CUDA_BUILD_IMAGE": BASE, "CUDA_BASE_IMAGE": BASE}
    arguments["REVISION"] = "0123abc"
    named = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
    buildah("build", "--layers=false", "--format=docker", "--pull-never", *named, "--tag", IMAGE, str(ROOT))


def _make_base() -> None:
    """Debian from its own packages, with this machine's certificates: what a company's own base image would have."""
    if not BASE_TAR.exists():
        BASE_TAR.parent.mkdir(exist_ok=True)
        part = BASE_TAR.with_suffix(".part")
        command = [tool("mmdebstrap"), "--variant=minbase", "--include=ca-certificates", "--format=tar", "bookworm"]
        subprocess.run([*command, str(part)], check=True, capture_output=True, timeout=600)
        part.rename(BASE_TAR)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(BASE_TAR), "/")
    if Path(CERTIFICATES).exists():
        buildah("add", "--quiet", container, CERTIFICATES, CERTIFICATES)
    buildah("commit", "--quiet", "--rm", container, BASE)


@dataclass(frozen=True)
class Image:
    """A built image, its file system mounted."""

    container: str
    root: Path
    config: dict[str, Any]
    size: str

    @classmethod
    def mounted(cls) -> Image:
        """The image that `build` made."""
        about = json.loads(buildah("inspect", "--type=image", IMAGE))
        container = buildah("from", "--pull-never", IMAGE)
        (listed,) = json.loads(buildah("images", "--json", IMAGE))
        return cls(container, Path(buildah("mount", container)), about["Docker"]["config"], listed["size"])

    def remove(self) -> None:
        """Unmount it; the image stays."""
        buildah("rm", self.container)


@dataclass
class Run:
    """One container: read-only root, no capability, no network but its own loopback, a user of group 0."""

    image: Image
    folder: Path
    arguments: tuple[str, ...] = ()
    uid: int = 10001
    models: Path | None = None
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Write the bundle and start."""
        self.name = f"outrider-{os.getpid()}-{self.folder.name}"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self._bundle()))
        self._log = self.folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._crun("run", "--bundle", str(self.folder), self.name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        """All that it has printed."""
        return self._log.read_text()

    def wait_for(self, probe: Callable[[], Any]) -> Any:
        """Poll until something true comes back."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if found := probe():
                return found
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log}"
            time.sleep(0.2)
        raise AssertionError(f"it did not happen in time:\n{self.log}")

    def ready(self) -> Run:
        """Wait until it says so."""
        self.wait_for(lambda: "ready at" in self.log)
        return self

    def inside(self, *command: str, **variables: str) -> str:
        """What a command inside prints, run as the container's user."""
        named = [f"{name}={value}" for name, value in variables.items()]
        done = subprocess.run(
            self._crun("exec", "--user", f"{self.uid}:0", self.name, "env", *named, *command),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}\n{self.log}"
        return done.stdout

    def stop(self) -> int:
        """SIGTERM to its process 1, as a runtime sends it; the exit code."""
        subprocess.run(self._crun("kill", self.name, "TERM"), check=True, capture_output=True)
        return self.process.wait(PATIENCE)

    def remove(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        subprocess.run(self._crun("delete", "--force", self.name), check=False, capture_output=True)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)

    def _crun(self, *arguments: str) -> list[str]:
        line = SUPPORTED_CGROUPS + '--cgroup-manager=disabled "$@"'
        tool("crun")
        return ["unshare", "--mount", "sh", "-c", line, "sh", *arguments]

    def _bundle(self) -> dict[str, Any]:
        spec = self._standard_spec()
        config = self.image.config
        spec["root"] = {"path": str(self.image.root), "readonly": True}
        # Tests share the cores: threads that spin for each other would stall all of them.
        variables = dict(entry.split("=", 1) for entry in config["Env"]) | {"OMP_NUM_THREADS": "1"} | self.variables
        spec["process"] |= {
            "terminal": False,
            "user": {"uid": self.uid, "gid": 0},
            "args": [*config["Entrypoint"], *self.arguments],
            "cwd": config["WorkingDir"],
            "env": [f"{name}={value}" for name, value in variables.items()],
            "capabilities": {kind: [] for kind in spec["process"]["capabilities"]},
            "noNewPrivileges": True,
        }
        spec["linux"].pop("resources", None)
        mounts = [mount for mount in spec["mounts"] if mount["destination"] != "/sys/fs/cgroup"]
        options = ["nosuid", "nodev"]
        mounts.append({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": [*options, "mode=1777"]})
        cache = [*options, "mode=2775", "uid=10001", "gid=0"]
        mounts.append({"destination": "/cache", "type": "tmpfs", "source": "tmpfs", "options": cache})
        if self.models is not None:
            bind = {"destination": "/models", "type": "bind", "source": str(self.models), "options": ["rbind", "ro"]}
            mounts.append(bind)
        return {**spec, "mounts": mounts}

    def _standard_spec(self) -> dict[str, Any]:
        subprocess.run(self._crun("spec", "--bundle", str(self.folder)), check=True, capture_output=True)
        spec: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return spec
