"""The process that compiles grammars for the first time: `python -m server.grammar.worker CPU_SECONDS MEMORY_BYTES`.

A grammar can be built to explode, and neither the library's own limits nor a thread's time-out stop all of them: the
process they explode in is stopped. One JSON object a line goes in, one comes out.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from setproctitle import setproctitle

from server.grammar.source import parser_limits, source_text
from server.messages import Grammar

_STACK_BYTES = 4 * 2**20
"""Half of what the engine's thread has: what is nested too deeply ends here, not there."""


_RANGE = re.compile(r"regex for (integer|float) range: min=(?:Some\((.*?)\)|None), max=(?:Some\((.*?)\)|None)")
"""The library's message about bounds that it cannot write as a regular expression."""


class Question(msgspec.Struct, frozen=True):
    """Can this be compiled?"""

    grammar: Grammar
    special_tokens: list[str]
    """Of the model: a grammar may name them."""


class Verdict(msgspec.Struct, frozen=True):
    """Whether it can."""

    problem: str
    """Empty if it can be compiled."""


def verdict(question: Question) -> Verdict:
    """Compile for a vocabulary of single bytes, and make the first mask."""
    words = _Bytes(question.special_tokens)
    tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=words.eos_token_id, slices=[])
    matcher = LLMatcher(tokenizer, source_text(question.grammar), log_level=0, limits=parser_limits())
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        return Verdict(_in_plain_words(matcher.get_error()))
    end = words.eos_token_id
    if not int.from_bytes(mask, "little") & ~(1 << end):
        return Verdict("it accepts no text, or none but the empty one")
    return Verdict("")


class _Bytes:
    """What `TokenizerWrapper` asks for: all bytes, the model's special tokens, and an end."""

    bos_token_id = None

    def __init__(self, special_tokens: list[str]) -> None:
        marks = [*(token.encode() for token in special_tokens), b"<|complete|>"]
        self.tokens = [*(bytes([byte]) for byte in range(256)), *marks]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _in_plain_words(error: str) -> str:
    """The library's message, without the echo of a long text."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines()]
    reason = next((line.removeprefix("error:").strip() for line in lines if line.startswith("error:")), None)
    if reason is not None:
        return f"invalid regular expression: {reason}"
    if error.startswith("oneOf"):
        return "oneOf is supported only where its alternatives visibly exclude each other; use anyOf"
    if error.startswith("NoExtensionBias"):
        return "it never comes to a text: a rule or $ref leads back to itself before anything is written"
    too_far = _RANGE.search(error)
    if too_far is not None:
        kind, *bounds = too_far.groups()
        minimum, maximum = (bound or "none" for bound in bounds)
        kind = "an integer" if kind == "integer" else "a number"
        return f"{kind} with minimum {minimum} and maximum {maximum} is not supported: use bounds of at most 18 digits"
    return next((line for line in lines if line), "it cannot be compiled").rstrip(".")[:300]


def main(cpu_seconds: float, memory_bytes: int) -> None:
    """Answer until the other side closes the pipe. What uses up its time or memory ends the process."""
    setproctitle("outrider: grammars")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    decoder = msgspec.json.Decoder(Question)
    for line in sys.stdin.buffer:
        question = decoder.decode(line)
        # The default action of this signal ends the process, in the middle of whatever it does.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = verdict(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
