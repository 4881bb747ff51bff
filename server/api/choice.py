"""One choice of an answer: turns the engine's tokens into text that may be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from server.api.detokenizer import Detokenizer
from server.api.draft_places import draft_places
from server.api.stop import StopMatcher
from server.checkpoint.token_bytes import TokenBytes
from server.messages import FinishReason, RequestOutput, TokenLogprobs


@dataclass(frozen=True)
class TextRules:
    """How tokens become the text of a choice."""

    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are text all the same: marks of what is read out of it."""


@dataclass(slots=True)
class Token:
    """One token of a choice, or of its prompt when that is echoed."""

    token_id: int
    logprobs: TokenLogprobs | None
    text: str
    """Its part of the choice's text: "" for a hidden token or while a character is incomplete."""
    offset: int
    """Characters of the choice's text before it."""
    data: bytes
    """Its bytes that are in the text."""
    generated: bool = True
    draft_position: int | None = None
    """Its place in the draft that proposed it, from 0; None when the target made it."""


@dataclass(slots=True)
class Delta:
    """What may be sent now: the texts of `tokens` joined are `text`."""

    text: str
    tokens: list[Token]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    request_at_fault: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = field(default=None)


def draft_positions(tokens: Sequence[Token]) -> list[int | None]:
    """Where each generated token stood in its draft."""
    return [token.draft_position for token in tokens if token.generated]


class Choice:
    """Feeds on `RequestOutput`s and gives `Delta`s, in streams and whole answers alike.

    Text is released token by token. A token is held back while it ends in part of a character or may be part of a stop
    string, so what was released never has to be taken back.
    """

    def __init__(self, index: int, token_bytes: TokenBytes, rules: TextRules) -> None:
        self.index = index
        self.completion_tokens = 0
        """Tokens that belong to the answer so far: those after a stop string do not."""
        self.released_tokens = 0
        """Of those, how many were part of a delta."""
        self.finished = False
        self._token_bytes = token_bytes
        self._rules = rules
        self._detokenizer = Detokenizer(
            token_bytes, skip_special_tokens=rules.skip_special_tokens, shown=rules.shown_ids
        )
        self._matcher = StopMatcher(rules.stops) if rules.stops else None
        self._waiting: list[Token] = []
        self._ready = 0  # how many of the waiting tokens end where a character ends
        self._length = 0

    def echo(self, token_ids: Sequence[int], added: frozenset[int], text_prompt: bool) -> None:
        """Put the prompt in front of the answer. Special tokens that a text prompt spells out are shown."""
        strip = self._token_bytes.strips_leading_space
        for position, token_id in enumerate(token_ids):
            hidden = position in added if text_prompt else self._detokenizer.is_hidden(token_id)
            data = b"" if hidden else self._token_bytes[token_id]
            if strip and data:
                data, strip = data.removeprefix(b" "), False
            self._append(token_id, None, data, generated=False)

    def feed(self, output: RequestOutput) -> Delta | None:
        """Take what the engine made; None when nothing may be sent yet."""
        if output.prompt_logprobs is not None:
            self._set_echo_logprobs(output.prompt_logprobs)
        stop_match: tuple[int, str] | None = None
        places = draft_places(output)
        for i, token_id in enumerate(output.token_ids):
            is_stop = output.stop_token_id is not None and i == len(output.token_ids) - 1
            hidden = (is_stop and not self._rules.include_stop) or self._detokenizer.is_hidden(token_id)
            data = b"" if hidden else self._token_bytes[token_id]
            logprobs = output.logprobs[i] if output.logprobs else None
            stop_match = self._append(token_id, logprobs, data, generated=True)
            self._waiting[-1].draft_position = places[i]
            if stop_match is not None:
                break
        finish_reason = output.finish_reason
        stop_reason: str | int | None = self._stop_reason(output)
        if stop_match is not None and finish_reason != "error":
            cut, stop_reason = stop_match
            finish_reason = "stop"
            self._cut(cut)
        elif finish_reason is not None:
            self._flush()
        delta = self._release(final=finish_reason is not None)
        if finish_reason is None and not delta.text and output.prompt_logprobs is None:
            return None
        self.finished = finish_reason is not None
        delta.finish_reason, delta.stop_reason = finish_reason, stop_reason
        delta.error, delta.request_at_fault = output.error, output.request_at_fault
        delta.prompt_logprobs = output.prompt_logprobs
        return delta

    def _set_echo_logprobs(self, logprobs: Sequence[TokenLogprobs | None]) -> None:
        """Give the echoed tokens, which all wait until the first output, their log-probabilities."""
        for token, entry in zip(self._waiting, logprobs, strict=False):
            token.logprobs = entry

    def _append(
        self, token_id: int, logprobs: TokenLogprobs | None, data: bytes, generated: bool
    ) -> tuple[int, str] | None:
        """Add a token; returns the end of the text and the stop string when that is complete."""
        text = self._detokenizer.feed_bytes(data)
        self._waiting.append(Token(token_id, logprobs, text, self._length, data, generated))
        start = self._length
        self._length += len(text)
        if self._detokenizer.complete:
            self._ready = len(self._waiting)
        if not generated:
            return None
        self.completion_tokens += 1
        if self._matcher is None or not text:
            return None
        match = self._matcher.feed(text, counts=self.completion_tokens >= self._rules.min_tokens)
        if match is None:
            return None
        end = start + match.end
        return (end if self._rules.include_stop else end - len(match.stop)), match.stop

    def _cut(self, end: int) -> None:
        """Take away the text beyond `end`; all of it still waits."""
        unfinished = self._detokenizer.pending_bytes
        for token in reversed(self._waiting):
            if token.offset + len(token.text) < end:
                break
            keep = max(0, end - token.offset)
            if keep:
                removed = unfinished + len(token.text[keep:].encode("utf-8"))
                token.data = token.data[: max(0, len(token.data) - removed)]
            else:  # its text, or the character that it begins, is gone
                token.data = b""
            token.text = token.text[:keep]
            token.offset = min(token.offset, end)
            unfinished = 0
        self._length = end

    def _flush(self) -> None:
        text = self._detokenizer.flush()
        if text and self._waiting:
            self._waiting[-1].text += text
            self._length += len(text)

    def _release(self, final: bool) -> Delta:
        ready = len(self._waiting) if final else self._ready
        if not final and self._matcher is not None and self._matcher.held:
            safe = self._length - self._matcher.held
            while ready and self._waiting[ready - 1].offset + len(self._waiting[ready - 1].text) > safe:
                ready -= 1
        text = "".join([token.text for token in self._waiting[:ready]])
        if not text and not final:
            return Delta("", [])
        tokens, self._waiting = self._waiting[:ready], self._waiting[ready:]
        self._ready = max(0, self._ready - ready)
        self.released_tokens += sum(token.generated for token in tokens)
        return Delta(text, tokens)

    def _stop_reason(self, output: RequestOutput) -> int | None:
        """The client's own stop id that ended the choice; None for the model's end of text."""
        stop = output.stop_token_id
        return None if stop is None or stop in self._rules.eos_token_ids else stop
