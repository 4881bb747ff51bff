"""Between text and token ids, in a small thread pool: never on the event loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from server.api.chat_template import ChatTemplates, Conversation
from server.api.errors import invalid
from server.api.long_text_worker import encode
from server.api.long_texts import LONG_TEXT, Ids, LongTexts
from server.api.schemas.completion import PromptInput
from server.api.template_renderer import TemplateRenderer
from server.checkpoint.token_bytes import TokenBytes

if TYPE_CHECKING:
    from server.checkpoint.tokenizer import TokenizerFiles

_ALWAYS_SHORT = 65536
_CHUNK = 65536


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt as the engine takes it."""

    token_ids: list[int]
    text: str | None
    """What the client wrote, when it wrote text."""
    added: frozenset[int] = frozenset()
    """Positions of the special tokens that the tokenizer added of its own accord, such as BOS."""


class TextCodec:
    """The tokenizer, the bytes of its tokens and the chat templates of the served model.

    The methods may block; call them through `Serving.work`.
    """

    def __init__(self, files: TokenizerFiles, vocab_size: int, renderer: TemplateRenderer) -> None:
        self.files = files
        self.vocab_size = vocab_size
        self.token_bytes = TokenBytes(files)
        self.templates = ChatTemplates(files.chat_templates, files.special_tokens, renderer)
        self._tokenizer = files.tokenizer
        self._long_texts = None if files.path is None else LongTexts(files.path)
        bos = files.special_tokens.get("bos_token")
        self._bos_id: int | None = None if bos is None else files.tokenizer.token_to_id(bos)

    def encode_prompts(
        self, prompts: Sequence[PromptInput], *, add_special_tokens: bool, keep_last: int | None, max_tokens: int
    ) -> list[EncodedPrompt]:
        """Tokenise what is text, check what is ids; `keep_last` cuts each prompt to its last tokens.

        Text that spells a special token becomes that token, as with every other server. Raises `ApiError` 400.
        """
        return [
            self._encode(prompt, add_special_tokens, keep_last, max_tokens)
            if isinstance(prompt, str)
            else EncodedPrompt(self.check_ids(prompt, "prompt")[-(keep_last or 0) :], None)
            for prompt in prompts
        ]

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int] | Ids:
        """The ids of any text, an empty one too, with one BOS at most; an array of those of a long text."""
        return self._ids_and_added(text, add_special_tokens)[0]

    def encode_chat(
        self,
        conversation: Conversation,
        *,
        add_special_tokens: bool,
        keep_last: int | None = None,
        max_tokens: int | None = None,
    ) -> EncodedPrompt:
        """Render the template and tokenise the result as a whole. Raises `ApiError` 400."""
        if keep_last is None and max_tokens is not None:
            # Templates drop parts of earlier answers, but nothing of what they were asked.
            asked = (message.get("content") for message in conversation.messages if message["role"] != "assistant")
            self._refuse_hopeless(sum(len(content) for content in asked if content), max_tokens, "messages")
        text = self.templates.render(conversation)
        return self._encode(text, add_special_tokens, keep_last, max_tokens, param="messages")

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenised at the start of a text and after a space."""
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(encoding.ids) for encoding in encodings if encoding.ids))

    def ids_of(self, marks: Iterable[str]) -> frozenset[int]:
        """Ids of those marks that are tokens."""
        found = (self._tokenizer.token_to_id(mark) for mark in marks if mark)
        return frozenset(token_id for token_id in found if token_id is not None)

    def check_ids(self, token_ids: list[int], param: str) -> list[int]:
        """The ids themselves; raises `ApiError` 400 when one lies outside the vocabulary."""
        for start in range(0, len(token_ids), _CHUNK):  # `min` of millions would hold up the event loop
            chunk = token_ids[start : start + _CHUNK]
            if min(chunk) >= 0 and max(chunk) < self.vocab_size:
                continue
            wrong = next(token_id for token_id in chunk if not 0 <= token_id < self.vocab_size)
            shown = wrong if abs(wrong) < 2**63 else "a far larger number"
            raise invalid(
                f"{param}: token ids go from 0 to {self.vocab_size - 1} for this model, got {shown}.", param=param
            )
        return token_ids

    def _encode(
        self,
        text: str,
        add_special_tokens: bool,
        keep_last: int | None,
        max_tokens: int | None,
        param: str = "prompt",
    ) -> EncodedPrompt:
        if keep_last is None and max_tokens is not None:
            self._refuse_hopeless(len(text), max_tokens, param)
        ids, added = self._ids_and_added(text, add_special_tokens)
        cut = 0 if keep_last is None else max(0, len(ids) - keep_last)
        ids = ids[cut:]
        if not ids:
            raise invalid(f"{param}: the text has no tokens.", param=param)
        token_ids = ids if isinstance(ids, list) else ids.tolist()
        return EncodedPrompt(token_ids, text, frozenset(i - cut for i in added if i >= cut))

    def _ids_and_added(self, text: str, add_special_tokens: bool) -> tuple[list[int] | Ids, list[int]]:
        """Ids, and the positions of those that the tokenizer added."""
        ids: list[int] | Ids
        if self._long_texts is not None and len(text) >= LONG_TEXT:
            ids, added = self._long_texts.encode(text, add_special_tokens)
        else:
            ids, added = encode(self._tokenizer, text, add_special_tokens)
        if len(ids) > 1 and 0 in added and ids[0] == ids[1] == self._bos_id:
            return ids[1:], [i - 1 for i in added if i]  # the text brought its own BOS
        return ids, added

    def _refuse_hopeless(self, length: int, max_tokens: int, param: str) -> None:
        """Refuse a text that is over the limit even if every token were the longest one, without tokenising it."""
        if length > _ALWAYS_SHORT and length > max_tokens * self._longest_token:
            raise invalid(
                f"{param}: a text of {length} characters is longer than the context of {max_tokens} tokens.",
                param=param,
                code="context_length_exceeded",
            )

    @cached_property
    def special_tokens(self) -> list[str]:
        """Texts of the tokens that are marks; a grammar may name them."""
        marks = sorted(self.files.special_ids | {*self.files.eos_token_ids})
        return [self.token_bytes.text(token_id) for token_id in marks if token_id < self.vocab_size]

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token (each character of a vocabulary entry is at least a byte of text)."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
