"""POST /v1/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from server.api.answer import AnswerHead, deliver
from server.api.body import read_request
from server.api.choice import Delta, draft_positions
from server.api.errors import invalid
from server.api.generation import SequenceState
from server.api.logprob_format import legacy_logprobs, prompt_logprobs
from server.api.responses import CompletionBody, CompletionChoice, MetricsBody, Usage
from server.api.sampling_params import TokenLimit
from server.api.schemas.completion import CompletionFields
from server.api.schemas.load import GenerateRequest, generate_loader
from server.api.sequences import Outline, build_sequences
from server.api.serving import Serving
from server.api.structured import grammar_of
from server.checkpoint.token_bytes import TokenBytes
from server.messages import Grammar

_DEFAULT_MAX_TOKENS = 16

_load = generate_loader(CompletionFields)


@dataclass(frozen=True)
class CompletionFormat:
    """Writes `text_completion` objects."""

    head: AnswerHead
    token_bytes: TokenBytes
    logprobs: int | None
    prompt_logprobs: int | None
    return_token_ids: bool
    return_draft_positions: bool

    def whole(
        self, choices: list[tuple[SequenceState, Delta]], usage: Usage, metrics: MetricsBody | UnsetType
    ) -> CompletionBody:
        """One object with all choices."""
        return self._body([self._choice(sequence, delta, True) for sequence, delta in choices], usage, metrics)

    def chunks(
        self,
        sequence: SequenceState,
        delta: Delta,
        first: bool,
        usage: Usage | None | UnsetType,
        metrics: MetricsBody | UnsetType,
    ) -> list[Struct]:
        """One chunk with one choice."""
        return [self._body([self._choice(sequence, delta, first)], usage, metrics)]

    def last_chunk(self, usage: Usage, metrics: MetricsBody | UnsetType) -> CompletionBody:
        """The usage chunk."""
        return self._body([], usage, metrics)

    def _body(
        self, choices: list[CompletionChoice], usage: Usage | None | UnsetType, metrics: MetricsBody | UnsetType
    ) -> CompletionBody:
        return CompletionBody(
            self.head.id,
            "text_completion",
            self.head.created,
            self.head.model,
            choices,
            usage=usage,
            metrics=metrics,
        )

    def _choice(self, sequence: SequenceState, delta: Delta, first: bool) -> CompletionChoice:
        prompt_ids = sequence.request.prompt_token_ids
        entries = delta.prompt_logprobs
        return CompletionChoice(
            index=sequence.choice.index,
            text=delta.text,
            logprobs=None if self.logprobs is None else legacy_logprobs(delta.tokens, self.logprobs, self.token_bytes),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=[token.token_id for token in delta.tokens if token.generated] if self.return_token_ids else UNSET,
            draft_positions=draft_positions(delta.tokens) if self.return_draft_positions else UNSET,
            prompt_token_ids=prompt_ids if self.return_token_ids and first else UNSET,
            prompt_logprobs=UNSET
            if self.prompt_logprobs is None or entries is None
            else prompt_logprobs(prompt_ids, entries, self.prompt_logprobs, self.token_bytes),
        )


async def create_completion(request: Request, serving: Serving) -> Response:
    """Continue one or many prompts. Raises `ApiError`."""
    arrived = time.monotonic()
    serving.check_ready()
    asked = await read_request(request, _load)
    model = serving.check_model_name(asked.delivery.model)
    serving.admit(len(asked.own.prompt) * asked.sampling.n)
    codec = serving.codec
    grammar = await serving.check_grammar(grammar_of(asked.sampling))
    sequences = await serving.work(request, lambda: _sequences(serving, asked, grammar, arrived))
    generation = serving.begin(sequences, arrived)
    style = CompletionFormat(
        AnswerHead("cmpl", model),
        codec.token_bytes,
        asked.own.logprobs,
        asked.delivery.prompt_logprobs,
        asked.delivery.return_token_ids,
        asked.delivery.return_draft_positions,
    )
    return await deliver(request, serving, generation, style, asked)


def _sequences(
    serving: Serving, asked: GenerateRequest[CompletionFields], grammar: Grammar | None, arrived: float
) -> list[SequenceState]:
    own, sampling, delivery = asked.own, asked.sampling, asked.delivery
    if own.best_of is not None and own.best_of != sampling.n:
        raise invalid(f"best_of: only the value of n ({sampling.n}) is supported, got {own.best_of}.", param="best_of")
    if own.max_tokens == 0 and not own.echo and delivery.prompt_logprobs is None:
        raise invalid(
            "max_tokens: 0 leaves nothing to answer, unless echo or prompt_logprobs is set.", param="max_tokens"
        )
    wanted = [delivery.prompt_logprobs, own.logprobs if own.echo else None]
    outline = Outline(
        sampling=sampling,
        delivery=delivery,
        limit=TokenLimit(own.max_tokens, "max_tokens", _DEFAULT_MAX_TOKENS),
        prompt_param="prompt",
        arrived=arrived,
        logprobs=own.logprobs,
        prompt_logprobs=max((count for count in wanted if count is not None), default=None),
        echo=own.echo,
        grammar=grammar,
    )
    prompts = serving.codec.encode_prompts(
        own.prompt,
        add_special_tokens=own.add_special_tokens,
        keep_last=delivery.truncate_prompt_tokens,
        max_tokens=serving.max_model_len,
    )
    return build_sequences(serving, outline, prompts)
