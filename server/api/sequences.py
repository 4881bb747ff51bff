"""From checked fields and tokenised prompts to the sequences that the engine is asked to continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from server.api.choice import Choice, TextRules
from server.api.engine_client import EngineClient
from server.api.errors import invalid
from server.api.generation import SequenceState
from server.api.sampling_params import (
    TokenLimit,
    build_sampling_params,
    check_draft_length,
    check_min_tokens,
    check_token_fields,
    choice_seed,
)
from server.api.schemas.sampling import DeliveryFields, SamplingFields
from server.api.serving import Serving
from server.api.tokenising import EncodedPrompt
from server.messages import EngineRequest, Grammar, SamplingParams


@dataclass(frozen=True)
class Outline:
    """What is the same for all sequences of a request, from the fields of its endpoint."""

    sampling: SamplingFields
    delivery: DeliveryFields
    limit: TokenLimit
    prompt_param: str
    """The field that holds the prompt."""
    arrived: float
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool = False
    grammar: Grammar | None = None
    """What the answers must be, already checked."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that stand in the text."""


def build_sequences(serving: Serving, outline: Outline, prompts: Sequence[EncodedPrompt]) -> list[SequenceState]:
    """Make n sequences per prompt, in the order of their index (prompt · n + k). Raises `ApiError` 400. May block."""
    codec, engine = serving.codec, serving.context.engine
    sampling = outline.sampling
    _check_priority(serving, outline.delivery.priority)
    check_token_fields(sampling, codec)
    check_draft_length(sampling, _most_drafted(engine))
    params = build_sampling_params(
        sampling,
        serving.model.defaults,
        codec=codec,
        bad_words=codec.encode_words(sampling.bad_words),
        logprobs=outline.logprobs,
        prompt_logprobs=outline.prompt_logprobs,
        grammar=outline.grammar,
    )
    rules = TextRules(
        stops=sampling.stop,
        min_tokens=sampling.min_tokens,
        include_stop=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        eos_token_ids=frozenset(codec.files.eos_token_ids),
        shown_ids=outline.shown_ids,
    )
    sequences: list[SequenceState] = []
    for prompt in prompts:
        max_tokens = outline.limit.resolve(len(prompt.token_ids), serving.max_model_len, outline.prompt_param)
        check_min_tokens(sampling.min_tokens, max_tokens)
        for k in range(sampling.n):
            choice = Choice(len(sequences), codec.token_bytes, rules)
            if outline.echo:
                choice.echo(prompt.token_ids, prompt.added, text_prompt=prompt.text is not None)
            completed = replace(params, max_tokens=max_tokens, seed=choice_seed(sampling.seed, k))
            request = _engine_request(engine, prompt, completed, outline)
            sequences.append(SequenceState(choice, request, counts_prompt=k == 0))
    return sequences


def _engine_request(
    engine: EngineClient, prompt: EncodedPrompt, params: SamplingParams, outline: Outline
) -> EngineRequest:
    return EngineRequest(
        request_id=engine.next_request_id(),
        prompt_token_ids=prompt.token_ids,
        params=params,
        arrived=outline.arrived,
        priority=outline.delivery.priority,
        cache_salt=outline.delivery.cache_salt,
    )


def _most_drafted(engine: EngineClient) -> int:
    speculative = engine.ready.speculative if engine.ready is not None else None
    return 0 if speculative is None else speculative.num_speculative_tokens


def _check_priority(serving: Serving, priority: int) -> None:
    if priority and not serving.context.priority_scheduling:
        raise invalid(
            "priority: this server works in order of arrival; it honours priorities when started with "
            "--scheduling-policy priority.",
            param="priority",
        )
