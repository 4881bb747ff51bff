"""The bytes that each token stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.checkpoint.tokenizer import TokenizerFiles

_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Maps token ids to bytes, so that text can be put together byte by byte.

    Byte-level BPE stores each byte as one printable character; SentencePiece vocabularies store text with a
    lower-one-eighth block for the space, and `<0xXX>` for single bytes. Ids without a token have no bytes.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = files.tokenizer
        self._added = {
            token_id: token.content for token_id, token in files.tokenizer.get_added_tokens_decoder().items()
        }
        self.special_ids = files.special_ids
        steps = _decoder_steps(files)
        kinds = {step.get("type") for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._sentencepiece = not self._byte_level and bool(kinds & {"ByteFallback", "Metaspace", "Replace"})
        self.strips_leading_space = self._sentencepiece and any(_strips_leading_space(step) for step in steps)
        """Whether the space before the first word of a whole text is the tokenizer's own."""
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = self._find(token_id)
        return data

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The whole text of `token_ids`, with U+FFFD for bytes that are no character."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self[token_id] for token_id in token_ids if token_id not in hidden)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def text(self, token_id: int) -> str:
        """The token alone as text, with U+FFFD for what is no character."""
        return self[token_id].decode("utf-8", "replace")

    def label(self, token_id: int) -> str:
        r"""The token alone as text that differs for different bytes: `bytes:\xe4\xb8` when it is no text."""
        data = self[token_id]
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _find(self, token_id: int) -> bytes:
        content = self._added.get(token_id)
        if content is not None:
            return content.encode("utf-8")
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _from_byte_level(token)
        if self._sentencepiece:
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes.fromhex(match[1]) if match else token.replace(_SPACE, " ").encode("utf-8")
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode("utf-8")


def _byte_level_characters() -> dict[str, int]:
    """GPT-2's map: bytes that print stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_level_characters()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode("utf-8")  # not written in the map: the text itself


def _decoder_steps(files: TokenizerFiles) -> list[dict[str, Any]]:
    decoder = files.tokenizer.decoder
    if decoder is None:
        return []
    # The decoder's own state is small; the whole tokenizer as JSON is tens of megabytes.
    description = json.loads(decoder.__getstate__())
    steps = description.get("decoders", [description])
    return [step for step in steps if isinstance(step, dict)]


def _strips_leading_space(step: dict[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return step.get("type") == "Strip" and step.get("content") == " " and int(step.get("start", 0)) > 0
