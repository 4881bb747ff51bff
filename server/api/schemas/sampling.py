"""The fields of both generating endpoints: how to sample, when to stop, how to deliver."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from server.api.schemas.fields import (
    STRICT,
    BadWords,
    Count,
    Int32,
    Int64,
    LogitBias,
    Penalty,
    Positive,
    Stops,
    TokenIds,
    TopK,
    TopLogprobs,
)
from server.api.schemas.structured import ResponseFormat, StructuredOutputs

MOST_DRAFTED = 16
"""Tokens that any server drafts at a time."""


class SpeculativeFields(BaseModel):
    """How this request is drafted."""

    model_config = STRICT

    num_speculative_tokens: Annotated[
        int,
        Field(ge=0, le=MOST_DRAFTED, description="At most so many tokens at a time: 0 to the server's own k."),
    ]


class SamplingFields(BaseModel):
    """How sequences are continued. None: not given, so that the model's own default holds."""

    model_config = STRICT

    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: Int64 | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=10)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = {}
    bad_words: BadWords = ()
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    stop: Stops = ()
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    min_tokens: Count = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative_decoding: Annotated[
        bool,
        Field(
            description="false: this request is decoded without drafts, for comparison. The answer follows the same "
            "distribution, and is the same text when greedy. true: drafts where the server was started with "
            "--speculative-config; elsewhere it changes nothing."
        ),
    ] = True
    speculative: SpeculativeFields | None = None


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = STRICT

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class DeliveryFields(BaseModel):
    """Which model, in which order, and what the answer holds beside the text."""

    model_config = STRICT

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool = False
    return_draft_positions: Annotated[
        bool,
        Field(description="Adds draft_positions: for each token of the answer its place in the draft, or null."),
    ] = False
    metrics: bool = False
    priority: Int32 = 0
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    truncate_prompt_tokens: Positive | None = None
