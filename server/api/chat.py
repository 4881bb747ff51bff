"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from server.api.answer import AnswerHead, deliver
from server.api.body import read_request
from server.api.choice import Delta
from server.api.errors import invalid
from server.api.generation import SequenceState
from server.api.logprob_format import chat_logprobs, prompt_logprobs
from server.api.responses import (
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessageBody,
    MetricsBody,
    PromptLogprobs,
    Usage,
)
from server.api.sampling_params import TokenLimit
from server.api.schemas.chat import ChatFields
from server.api.schemas.load import GenerateRequest, generate_loader
from server.api.sequences import Outline, build_sequences
from server.api.serving import Serving
from server.api.structured import grammar_of
from server.api.tokenising import ChatPrompt
from server.checkpoint.token_bytes import TokenBytes
from server.messages import Grammar

_load = generate_loader(ChatFields)


@dataclass(frozen=True)
class ChatFormat:
    """Writes `chat.completion` objects and their chunks."""

    head: AnswerHead
    token_bytes: TokenBytes
    top_logprobs: int | None
    prompt_logprobs: int | None
    return_token_ids: bool

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
        """One chunk with one choice, after one that names the role."""
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
        if delta.text or delta.tokens or delta.finish_reason is not None:
            choice = ChatChunkChoice(
                index=index,
                delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
                logprobs=self._logprobs(delta),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                token_ids=self._token_ids(delta),
            )
            chunks.append(self._chunk([choice], usage, metrics))
        return chunks

    def last_chunk(self, usage: Usage, metrics: MetricsBody | UnsetType) -> ChatBody:
        """The usage chunk."""
        return self._chunk([], usage, metrics)

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
        return ChatChoice(
            index=sequence.choice.index,
            message=ChatMessageBody("assistant", delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=self._token_ids(delta),
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self.top_logprobs is None:
            return None
        return chat_logprobs(delta.tokens, self.top_logprobs, self.token_bytes)

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return [token.token_id for token in delta.tokens] if self.return_token_ids else UNSET

    def _prompt_logprobs(self, sequence: SequenceState, delta: Delta) -> PromptLogprobs | UnsetType:
        if self.prompt_logprobs is None or delta.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(
            sequence.request.prompt_token_ids, delta.prompt_logprobs, self.prompt_logprobs, self.token_bytes
        )


async def create_chat_completion(request: Request, serving: Serving) -> Response:
    """Answer a conversation. Raises `ApiError`."""
    arrived = time.monotonic()
    serving.check_ready()
    asked = await read_request(request, _load)
    model = serving.check_model_name(asked.delivery.model)
    serving.admit(asked.sampling.n)
    codec = serving.codec
    top_logprobs = _top_logprobs(asked.own)
    grammar = await serving.check_grammar(grammar_of(asked.sampling))
    sequences = await serving.work(request, lambda: _sequences(serving, asked, top_logprobs, grammar, arrived))
    generation = serving.begin(sequences, arrived)
    style = ChatFormat(
        AnswerHead("chatcmpl", model),
        codec.token_bytes,
        top_logprobs,
        asked.delivery.prompt_logprobs,
        asked.delivery.return_token_ids,
    )
    return await deliver(request, serving, generation, style, asked)


def _top_logprobs(own: ChatFields) -> int | None:
    if own.top_logprobs and not own.logprobs:
        raise invalid("top_logprobs: set logprobs to true to get them.", param="top_logprobs")
    return (own.top_logprobs or 0) if own.logprobs else None


def _sequences(
    serving: Serving,
    asked: GenerateRequest[ChatFields],
    top_logprobs: int | None,
    grammar: Grammar | None,
    arrived: float,
) -> list[SequenceState]:
    own, delivery = asked.own, asked.delivery
    longer = own.max_completion_tokens
    outline = Outline(
        sampling=asked.sampling,
        delivery=delivery,
        limit=TokenLimit(
            own.max_tokens if longer is None else longer,
            "max_tokens" if longer is None else "max_completion_tokens",
            serving.model.defaults.max_new_tokens,
        ),
        prompt_param="messages",
        arrived=arrived,
        logprobs=top_logprobs,
        prompt_logprobs=delivery.prompt_logprobs,
        grammar=grammar,
    )
    chat = ChatPrompt(
        messages=[message.model_dump(exclude_none=True) for message in own.messages],
        add_generation_prompt=own.add_generation_prompt,
        add_special_tokens=own.add_special_tokens,
        arguments=own.chat_template_kwargs,
    )
    prompt = serving.codec.encode_chat(
        chat, keep_last=delivery.truncate_prompt_tokens, max_tokens=serving.max_model_len
    )
    return build_sequences(serving, outline, [prompt])
