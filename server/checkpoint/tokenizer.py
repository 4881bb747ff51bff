"""The tokenizer of a checkpoint, with its chat templates, special tokens and stop ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from server.checkpoint.chat_templates import read_chat_templates
from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.gguf_header import read_gguf_header
from server.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from server.checkpoint.json_files import MIB, read_bytes, read_optional_json_object
from server.checkpoint.locate import gguf_file, locate_files
from server.errors import UserError

TOKENIZER_LIMIT = 256 * MIB
CONFIG_LIMIT = 16 * MIB
"""`tokenizer_config.json` lists added tokens: up to some MiB."""

_JSON = "tokenizer.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """All that the API process needs to turn text into ids and back."""

    tokenizer: Tokenizer
    """Neither truncates nor pads. `add_special_tokens` adds what the checkpoint's own post-processor adds."""
    chat_templates: Mapping[str, str]
    """Jinja source by name, the usual one under "default"; empty if there is none."""
    special_tokens: Mapping[str, str]
    """Text of `bos_token`, `eos_token` and so on, as far as they are declared: chat templates use them."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence: all that generation_config, config and tokenizer name, in this order."""
    special_ids: frozenset[int]
    """Ids of tokens that are marks, not text: left out when decoding for a reader."""
    kind: str
    """For people."""
    path: Path | None = None
    """The file that `read_tokenizer` reads again, in another process."""


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer alone of a tokenizer.json or a GGUF file, without truncation and padding.

    Raises:
        UserError: it is no usable one.
    """
    if file.name == _JSON:
        try:
            tokenizer = Tokenizer.from_buffer(read_bytes(file, TOKENIZER_LIMIT))
        except Exception as error:  # the library raises this very class for any fault in the file
            raise UserError(f"{file} is not a usable tokenizer: {error}") from error
    else:
        tokenizer = tokenizer_from_gguf(read_gguf_header(file)).tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_tokenizer(
    checkpoint: Checkpoint, override: str | None = None, *, download_dir: Path | None = None
) -> TokenizerFiles:
    """Load the tokenizer of a checkpoint, or the one that `override` names.

    Args:
        checkpoint: its generation config and config name ids that end a sequence, whichever tokenizer is used.
        override: a folder, a `.gguf` file or a hub id.
        download_dir: cache of hub downloads for `override`.

    Raises:
        UserError: no tokenizer, one in a format that is not supported, or a broken file; the message names it.
    """
    path = checkpoint.path if override is None else locate_files(override, download_dir)
    file = None if (path / _JSON).exists() else gguf_file(path)
    if file is None:
        parts = _from_folder(path)
    else:
        found = tokenizer_from_gguf(read_gguf_header(file))
        parts = _Parts(found.tokenizer, found.chat_templates, found.special_tokens, found.stop_ids, found.kind)
    parts.tokenizer.no_truncation()
    parts.tokenizer.no_padding()
    declared = _stop_ids(checkpoint.generation_config) + _stop_ids(checkpoint.config) + parts.stop_ids
    added = parts.tokenizer.get_added_tokens_decoder()
    return TokenizerFiles(
        parts.tokenizer,
        parts.chat_templates,
        parts.special_tokens,
        tuple(dict.fromkeys(declared)),
        frozenset(token_id for token_id, token in added.items() if token.special),
        parts.kind,
        file or path / _JSON,
    )


@dataclass(frozen=True)
class _Parts:
    tokenizer: Tokenizer
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    stop_ids: tuple[int, ...]
    kind: str


def _from_folder(folder: Path) -> _Parts:
    file = folder / _JSON
    if not file.exists():
        other = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).exists()]
        has = f" ({other[0]} alone is not supported; transformers can convert it)" if other else ""
        raise UserError(f"{folder} has no tokenizer.json{has}; name another tokenizer with --tokenizer")
    tokenizer = read_tokenizer(file)
    config = read_optional_json_object(folder / "tokenizer_config.json", CONFIG_LIMIT)
    special_tokens = _special_tokens(folder, config)
    stop = tokenizer.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return _Parts(
        tokenizer,
        read_chat_templates(folder, config),
        special_tokens,
        () if stop is None else (stop,),
        f"{type(tokenizer.model).__name__} (tokenizer.json)",
    )


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens of tokenizer_config.json; the legacy map wins when that file lists no added tokens."""
    entries = dict(config)
    if "added_tokens_decoder" not in config:
        entries |= read_optional_json_object(folder / "special_tokens_map.json", CONFIG_LIMIT)
    tokens = {}
    for name in _SPECIAL_TOKENS:
        match entries.get(name):
            case str(content) | {"content": str(content)}:
                tokens[name] = content
    return tokens


def _stop_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise UserError(f"eos_token_id in the model's configuration holds {token_id!r}, which is no token id")
    return tuple(ids)
