"""Download of a model from the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from server.errors import UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WANTED = ["*.json", "*.safetensors", "*.jinja"]
UNWANTED = ["consolidated*", "original/*", "*/*.safetensors", "onnx/*", "*.onnx*"]


def is_hub_id(model: str) -> bool:
    """Whether the text has the form `name` or `organisation/name`."""
    return _HUB_ID.fullmatch(model) is not None and len(model) <= 96 and ".." not in model and "--" not in model


def download(repo_id: str, download_dir: Path | None, ignore_patterns: Sequence[str] = ()) -> Path:
    """Return the folder of a snapshot of the repository, downloading what the cache lacks (with a progress bar).

    Only configuration, tokenizer, templates and safetensors weights are fetched.

    Raises:
        UserError: no such repository, no access, no network (or HF_HUB_OFFLINE is set) and not in the cache.
    """
    # Costs 0.1 s and reads the environment: only for those who name a hub id.
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    unwanted = [*UNWANTED, *ignore_patterns]
    try:
        return Path(snapshot_download(repo_id, cache_dir=download_dir, allow_patterns=WANTED, ignore_patterns=unwanted))
    except GatedRepoError as error:
        raise UserError(
            f"{repo_id} is gated: accept its terms on https://huggingface.co/{repo_id} and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{repo_id} is neither a path on this machine nor a public repository on the Hugging Face hub "
            "(a private one needs HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set"
        else:
            reason = "the Hugging Face hub could not be reached"
        raise UserError(
            f"{repo_id} is no path on this machine, it is not complete in the local cache, and {reason}; "
            "name a folder or a .gguf file, or download the model first"
        ) from error
