"""Tokenising texts so long that the API would stand still over their ids."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TypeAlias

import msgspec

from server.api.errors import invalid
from server.api.long_text_worker import LongText, LongTextTokens
from server.api.worker_process import WorkerPool

LONG_TEXT = 512 * 1024
"""Characters from which on a text is tokenised in a process of its own: some 10 ms of its ids at once."""
_CPU_SECONDS = 120.0
_MEMORY_BYTES = 16 * 2**30

Ids: TypeAlias = "array[int]"


class LongTexts:
    """Tokenises in a worker process, which starts with the first long text. The method blocks; call it from threads."""

    def __init__(self, file: Path) -> None:
        """`file`: the tokenizer's, as `read_tokenizer` takes it."""
        self._file = str(file)
        self._pool = WorkerPool("server.api.long_text_worker", cpu_seconds=_CPU_SECONDS, memory_bytes=_MEMORY_BYTES)
        self._decoder = msgspec.json.Decoder(LongTextTokens)

    def encode(self, text: str, add_special_tokens: bool) -> tuple[Ids, list[int]]:
        """Ids, and the positions of those that the tokenizer added.

        Raises:
            ApiError: 400, it takes too long or too much memory.
        """
        answer = self._pool.ask(msgspec.json.encode(LongText(self._file, text, add_special_tokens)))
        if answer is None:
            raise invalid(
                f"A text of {len(text)} characters could not be tokenised within {_CPU_SECONDS:g} seconds of processor "
                f"time and {_MEMORY_BYTES // 2**30} GiB. Send a shorter one.",
                code="text_too_long",
            )
        tokens = self._decoder.decode(answer)
        ids = array("I")
        ids.frombytes(tokens.ids)
        return ids, tokens.added
