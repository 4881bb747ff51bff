"""The JSON of answers, with OpenAI's names."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from server.messages import FinishReason


class PromptTokensDetails(Struct, frozen=True):
    """Where the prompt tokens came from."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Token counts of a request: each prompt once, all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TimingsBody(Struct, frozen=True):
    """Seconds; null for what never happened."""

    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    time_to_first_token_seconds: float | None
    total_seconds: float


class SpeculativeDecodingBody(Struct, frozen=True):
    """What became of the drafts of a request, over all its choices."""

    mean_acceptance_length: float | None
    """Tokens that a step with a draft made, the target's own among them; null without such a step."""
    draft_acceptance_rate: float | None
    """Accepted per drafted token; null when none was drafted."""
    acceptance_histogram: list[int]
    """Steps with a draft, by the number of its tokens that were accepted, 0 to k."""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """k, the longest draft that the server makes."""


class MetricsBody(Struct, frozen=True):
    """What `metrics: true` adds."""

    timings: TimingsBody
    speculative_decoding: SpeculativeDecodingBody | None
    """null where the server does not speculate."""


class PromptLogprob(Struct, frozen=True):
    """One token that could stand at a place of the prompt."""

    logprob: float | None
    rank: int
    decoded_token: str


DraftPositions = list[int | None]
"""For each token of the answer its place in the draft that proposed it, from 0; null: the target made it."""

PromptLogprobs = list[dict[str, PromptLogprob] | None]


class LegacyLogprobs(Struct, frozen=True):
    """Log-probabilities as parallel lists; the tokens joined are the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    """One choice of /v1/completions, whole or a piece of it."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    draft_positions: DraftPositions | UnsetType = UNSET


class CompletionBody(Struct, frozen=True):
    """An answer of /v1/completions, whole or a chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage | None | UnsetType = UNSET
    metrics: MetricsBody | UnsetType = UNSET


class TopLogprob(Struct, frozen=True):
    """A token that could stand at a place, with its own bytes."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    """A token of the answer; its bytes are those in the content, none for a hidden token."""

    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Log-probabilities of a chat choice; the bytes joined are the content."""

    content: list[ChatLogprob]
    refusal: None = None


class FunctionBody(Struct, frozen=True):
    """A function that is called."""

    name: str
    arguments: str
    """JSON as the model wrote it."""


class ToolCallBody(Struct, frozen=True):
    """A tool call of a whole answer."""

    id: str
    function: FunctionBody
    type: Literal["function"] = "function"


class FunctionDelta(Struct, frozen=True):
    """A piece of a call: the name once, with the first piece; the arguments joined are the whole."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct, frozen=True):
    """A piece of one tool call."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessageBody(Struct, frozen=True):
    """The assistant's answer."""

    role: str
    content: str | None
    """null where the answer has reasoning or tool calls alone."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    """A piece of the assistant's answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


ChatFinishReason = FinishReason | Literal["tool_calls"]


class ChatChoice(Struct, frozen=True):
    """One whole choice of /v1/chat/completions."""

    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    draft_positions: DraftPositions | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """A piece of one choice of /v1/chat/completions."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    draft_positions: DraftPositions | UnsetType = UNSET


class ChatBody(Struct, frozen=True):
    """An answer of /v1/chat/completions, whole or a chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice]
    system_fingerprint: str | None = None
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    metrics: MetricsBody | UnsetType = UNSET
