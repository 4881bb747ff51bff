"""What a span says of a request, under the names of OpenTelemetry's conventions for generative AI where it has some.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/. Nothing that a client wrote is among it: no prompt, no
answer, no stop string.
"""

from __future__ import annotations

from server.api.generation import Generation

Attributes = dict[str, str | bool | int | float | list[str]]


def request_attributes(generation: Generation) -> Attributes:
    """What was asked for."""
    params = generation.sequences[0].request.params
    prompts = sum(sequence.counts_prompt for sequence in generation.sequences)
    found: Attributes = {
        "gen_ai.request.max_tokens": max(s.request.params.max_tokens for s in generation.sequences),
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }
    if params.top_k:
        found["gen_ai.request.top_k"] = params.top_k
    if len(generation.sequences) > prompts:
        found["gen_ai.request.choice.count"] = len(generation.sequences) // prompts
    return found


def outcome_attributes(generation: Generation) -> Attributes:
    """What became of it."""
    found: Attributes = {
        "gen_ai.response.finish_reasons": [s.finish_reason or "abort" for s in generation.sequences],
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.output_tokens": generation.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
    }
    first = generation.timings.time_to_first_token_seconds
    if first is not None:
        found["gen_ai.response.time_to_first_chunk"] = first
    drafts = generation.drafts
    if drafts.steps:
        found |= {
            "outrider.speculation.drafts": drafts.steps,
            "outrider.speculation.draft_tokens": drafts.drafted,
            "outrider.speculation.accepted_tokens": drafts.accepted,
            "outrider.speculation.acceptance_length": 1 + drafts.accepted / drafts.steps,
        }
    return found


def phases(generation: Generation) -> list[tuple[str, float, float]]:
    """Name, begin and end of what a request went through, in `time.monotonic()` seconds.

    Of several choices from the first to the last; what was not reached is left out.
    """
    scheduled = [s.first_scheduled for s in generation.sequences if s.first_scheduled is not None]
    firsts = [s.first_token for s in generation.sequences if s.first_token is not None]
    lasts = [s.last_token for s in generation.sequences if s.last_token is not None]
    found = []
    if scheduled:
        begin = max(generation.arrived, min(scheduled))
        found.append(("queue", generation.arrived, begin))
        if firsts:
            found.append(("prefill", begin, max(begin, min(firsts))))
    if firsts and lasts:
        found.append(("decode", min(firsts), max(lasts)))
    return found
