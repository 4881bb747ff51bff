"""Writing `chat.completion` objects and their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, Struct, UnsetType

from server.api.answer import AnswerHead
from server.api.choice import Delta, draft_positions
from server.api.generation import SequenceState
from server.api.logprob_format import chat_logprobs, prompt_logprobs
from server.api.message_piece import CallPiece, MessagePiece
from server.api.message_reader import MessageReader, ReadingRules
from server.api.responses import (
    CallDelta,
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    ChatMessageBody,
    DraftPositions,
    FunctionBody,
    FunctionDelta,
    MetricsBody,
    PromptLogprobs,
    ToolCallBody,
    Usage,
)
from server.checkpoint.token_bytes import TokenBytes


@dataclass(frozen=True)
class ChatFormat:
    """Writes the answers of one request. Log-probabilities and ids cover every token, whatever part it belongs to."""

    head: AnswerHead
    token_bytes: TokenBytes
    top_logprobs: int | None
    prompt_logprobs: int | None
    return_token_ids: bool
    return_draft_positions: bool
    rules: ReadingRules = ReadingRules()
    _readers: dict[int, MessageReader] = field(default_factory=dict)

    def whole(
        self, choices: list[tuple[SequenceState, Delta]], usage: Usage, metrics: MetricsBody | UnsetType
    ) -> ChatBody:
        """One object with all choices."""
        first, delta = choices[0]
        return ChatBody(
            self.head.id,
            "chat.completion",
            self.head.created,
            self.head.model,
            [self._choice(sequence, delta) for sequence, delta in choices],
            usage=usage,
            prompt_token_ids=first.request.prompt_token_ids if self.return_token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(first, delta),
            metrics=metrics,
        )

    def chunks(
        self,
        sequence: SequenceState,
        delta: Delta,
        first: bool,
        usage: Usage | None | UnsetType,
        metrics: MetricsBody | UnsetType,
    ) -> list[Struct]:
        """One chunk with one choice, after one that names the role; none while its text has to wait."""
        chunks: list[Struct] = []
        index = sequence.choice.index
        if first:
            with_prompt = index == 0
            role = ChatChunkChoice(index, ChatDelta(role="assistant", content=""), None, None)
            chunks.append(
                self._chunk(
                    [role],
                    usage,
                    UNSET,
                    sequence.request.prompt_token_ids if with_prompt and self.return_token_ids else UNSET,
                    self._prompt_logprobs(sequence, delta) if with_prompt else UNSET,
                )
            )
        piece, finish_reason = self._read(sequence, delta)
        shows_tokens = self.return_token_ids or self.return_draft_positions or self.top_logprobs is not None
        if piece != MessagePiece() or finish_reason is not None or (delta.tokens and shows_tokens):
            choice = ChatChunkChoice(
                index=index,
                delta=ChatDelta(
                    content=piece.content or UNSET,
                    reasoning_content=piece.reasoning or UNSET,
                    tool_calls=[_call_delta(call) for call in piece.calls] or UNSET,
                ),
                logprobs=self._logprobs(delta),
                finish_reason=finish_reason,
                stop_reason=delta.stop_reason,
                token_ids=self._token_ids(delta),
                draft_positions=self._draft_positions(delta),
            )
            chunks.append(self._chunk([choice], usage, metrics))
        return chunks

    def last_chunk(self, usage: Usage, metrics: MetricsBody | UnsetType) -> ChatBody:
        """The usage chunk."""
        return self._chunk([], usage, metrics)

    def _read(self, sequence: SequenceState, delta: Delta) -> tuple[MessagePiece, ChatFinishReason | None]:
        index = sequence.choice.index
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = MessageReader(self.rules)
        piece = reader.feed(delta.text, delta.finish_reason)
        if delta.finish_reason == "stop" and reader.has_calls:
            return piece, "tool_calls"
        return piece, delta.finish_reason

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | None | UnsetType,
        metrics: MetricsBody | UnsetType,
        prompt_token_ids: list[int] | UnsetType = UNSET,
        prompt_logprobs: PromptLogprobs | UnsetType = UNSET,
    ) -> ChatBody:
        return ChatBody(
            self.head.id,
            "chat.completion.chunk",
            self.head.created,
            self.head.model,
            choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            metrics=metrics,
        )

    def _choice(self, sequence: SequenceState, delta: Delta) -> ChatChoice:
        piece, finish_reason = self._read(sequence, delta)
        only_other_parts = not piece.content and bool(piece.calls or piece.reasoning)
        return ChatChoice(
            index=sequence.choice.index,
            message=ChatMessageBody(
                "assistant",
                None if only_other_parts else piece.content,
                reasoning_content=piece.reasoning or UNSET,
                tool_calls=_whole_calls(piece.calls) or UNSET,
            ),
            logprobs=self._logprobs(delta),
            finish_reason=finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=self._token_ids(delta),
            draft_positions=self._draft_positions(delta),
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self.top_logprobs is None:
            return None
        return chat_logprobs(delta.tokens, self.top_logprobs, self.token_bytes)

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return [token.token_id for token in delta.tokens] if self.return_token_ids else UNSET

    def _draft_positions(self, delta: Delta) -> DraftPositions | UnsetType:
        return draft_positions(delta.tokens) if self.return_draft_positions else UNSET

    def _prompt_logprobs(self, sequence: SequenceState, delta: Delta) -> PromptLogprobs | UnsetType:
        if self.prompt_logprobs is None or delta.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(
            sequence.request.prompt_token_ids, delta.prompt_logprobs, self.prompt_logprobs, self.token_bytes
        )


def _call_delta(call: CallPiece) -> CallDelta:
    if call.name is None:
        return CallDelta(call.index, FunctionDelta(call.arguments))
    return CallDelta(call.index, FunctionDelta(call.arguments, call.name), call.id or UNSET, "function")


def _whole_calls(pieces: Sequence[CallPiece]) -> list[ToolCallBody]:
    """The calls of all pieces of a message; the first piece of each has its name."""
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        arguments.setdefault(piece.index, []).append(piece.arguments)
    return [
        ToolCallBody(piece.id or "", FunctionBody(piece.name, "".join(arguments[piece.index])))
        for piece in pieces
        if piece.name is not None
    ]
