"""Text from token ids that come one by one."""

from __future__ import annotations

import codecs

from server.checkpoint.token_bytes import TokenBytes

_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Joins the bytes of tokens to UTF-8 text; what it has returned so far is always a prefix of the whole text.

    A character that is not complete waits; bytes that can be no character become U+FFFD, at the same places as in a
    decode of all bytes at once.
    """

    def __init__(
        self, token_bytes: TokenBytes, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ) -> None:
        """`shown` are special tokens that are not skipped."""
        self._token_bytes = token_bytes
        self._hidden = token_bytes.special_ids - shown if skip_special_tokens else frozenset()
        self._decoder = _decoder("replace")
        self.complete = True
        """False while part of a character waits."""

    def is_hidden(self, token_id: int) -> bool:
        """Whether the token never shows in the text."""
        return token_id in self._hidden

    def feed(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        return "" if token_id in self._hidden else self.feed_bytes(self._token_bytes[token_id])

    def feed_bytes(self, data: bytes) -> str:
        """The text that these bytes complete."""
        text = self._decoder.decode(data)
        if data:
            self.complete = data[-1] < 0x80 or not self._decoder.getstate()[0]
        return text

    @property
    def pending_bytes(self) -> int:
        """How many bytes wait for the rest of their character."""
        return len(self._decoder.getstate()[0])

    def flush(self) -> str:
        """The end: U+FFFD for a character that stayed incomplete, else nothing."""
        self.complete = True
        return self._decoder.decode(b"", final=True)
