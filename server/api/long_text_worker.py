"""The process that tokenises long texts: `python -m server.api.long_text_worker CPU_SECONDS MEMORY_BYTES`.

A list of a million ids is made in one go, in which no other thread of the process can answer anybody. One JSON object a
line goes in, one comes out.
"""

from __future__ import annotations

import resource
import signal
import sys
from array import array
from functools import cache
from pathlib import Path

import msgspec
from setproctitle import setproctitle
from tokenizers import Tokenizer

from server.checkpoint.tokenizer import read_tokenizer


class LongText(msgspec.Struct, frozen=True):
    """What to tokenise."""

    file: str
    """The tokenizer's."""
    text: str
    add_special_tokens: bool


class LongTextTokens(msgspec.Struct, frozen=True):
    """Its tokens."""

    ids: bytes
    """uint32, in the machine's order."""
    added: list[int]
    """Positions of those that the tokenizer added."""


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> tuple[list[int], list[int]]:
    """Ids, and the positions of those that the tokenizer added."""
    # Of the library's methods only those on batches let other threads run meanwhile: a long text takes seconds.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    if not add_special_tokens or not tokenizer.num_special_tokens_to_add(is_pair=False):
        return ids, []
    return ids, [i for i, added in enumerate(encoding.special_tokens_mask) if added]


def main(cpu_seconds: float, memory_bytes: int) -> None:
    """Answer until the other side closes the pipe. A text that uses up its time ends the process."""
    setproctitle("outrider: long texts")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer_of = cache(read_tokenizer)
    decoder = msgspec.json.Decoder(LongText)
    for line in sys.stdin.buffer:
        # The default action of this signal ends the process, in the middle of whatever it does.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        asked = decoder.decode(line)
        ids, added = encode(tokenizer_of(Path(asked.file)), asked.text, asked.add_special_tokens)
        answer = msgspec.json.encode(LongTextTokens(array("I", ids).tobytes(), added))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
