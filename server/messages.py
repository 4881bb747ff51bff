"""The structs that cross the border between the API process and the engine process.

Encoded as msgpack by msgspec; tagged unions, so each side decodes into exactly these types or fails.
Times are `time.monotonic()` seconds, which one machine's processes share.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort", "error"]


class Grammar(Struct, frozen=True):
    """A language that an answer must belong to, in a form that llguidance compiles."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """A JSON schema as JSON, a regular expression, or a grammar in llguidance's dialect of Lark."""


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """How one sequence is continued. Already validated and complete: the engine adds no defaults of its own."""

    max_tokens: int
    """Upper bound on generated tokens, at least 0 (0: only prompt logprobs are wanted)."""
    seed: int
    """Seeds the counter-based random numbers; the API draws one when the client gave none."""
    min_tokens: int = 0
    """Stop ids (`stop_token_ids` below, EOS among them) are banned until so many tokens exist."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is banned when the preceding ones were just generated."""
    allowed_token_ids: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence: the model's EOS ids unless `ignore_eos`, and the client's own."""
    logprobs: int | None = None
    """Number of alternatives beside the chosen token's own log-probability; None is off, 0 only the chosen one."""
    prompt_logprobs: int | None = None
    """The same for every prompt token."""
    most_drafted: int | None = None
    """Tokens that may be drafted for this request at a time; None is as many as the server drafts."""
    grammar: Grammar | None = None
    """The answer's language; the sequence stops where the grammar leaves nothing to add."""


class EngineRequest(Struct, frozen=True, tag="request", omit_defaults=True):
    """One sequence to continue. A client request with n choices becomes n of these."""

    request_id: int
    """Unique within the life of the API process."""
    prompt_token_ids: list[int]
    params: SamplingParams
    arrived: float
    priority: int = 0
    """Lower runs first under `--scheduling-policy priority`."""
    cache_salt: str = ""
    """Requests share prefix-cache blocks only with requests of the same salt."""


class Abort(Struct, frozen=True, tag="abort"):
    """These requests are over for the API process: free their blocks, send nothing more for them."""

    request_ids: list[int]


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """Leave the loop and exit 0."""


ToEngine = EngineRequest | Abort | Shutdown


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the model's own distribution (before penalties and temperature)."""

    logprob: float
    """Of the token that stands there."""
    rank: int
    """Of that token, 1 is the most probable."""
    top_ids: list[int]
    top_logprobs: list[float]


class RequestOutput(Struct, frozen=True, omit_defaults=True):
    """What one step made for one request."""

    request_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token in `token_ids` when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Once, with the first output: one entry per prompt token, the first None."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id that ended the sequence; it is the last of `token_ids`."""
    error: str | None = None
    """For the user, with finish_reason "error"."""
    request_at_fault: bool = False
    """Whether that error is the request's own, so that it would end in it again."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache (on the first output)."""
    first_scheduled: float = 0.0
    """When the request first entered a step (on the first output)."""
    drafted: int = 0
    """Drafted tokens that this step verified."""
    accepted: int = 0
    """Those of them that the target confirmed; `token_ids` holds one more, its own."""
    draft_places: list[int | None] | None = None
    """Of an output that joins several steps: each token's place in its draft. One step's follow from `accepted`."""


class DraftCounts(Struct, frozen=True):
    """Totals of speculative decoding since the engine started; empty lists when it is off."""

    drafted: list[int] = []
    """By position from 0: drafted tokens that the target verified."""
    accepted: list[int] = []
    """By position from 0: those that it confirmed."""
    lengths: list[int] = []
    """Drafts by the number of tokens confirmed, 0 to k."""
    chosen: list[int] = []
    """Steps by the most tokens that a request was let draft after them, 0 to k; steps on the device choose nothing."""


class EngineStats(Struct, frozen=True):
    """A snapshot; counters are totals since the engine started."""

    running: int
    waiting: int
    kv_usage: float
    """Share of blocks in use by live requests, 0 to 1."""
    preemptions: int
    prefix_queries: int
    """Tokens looked up in the prefix cache."""
    prefix_hits: int
    """Tokens found there."""
    steps: int
    phase_seconds: dict[str, list[float]]
    """Since the last snapshot: durations of each step by phase (schedule, target, draft, verify)."""
    drafts: DraftCounts = DraftCounts()


class EngineOutputs(Struct, frozen=True, tag="outputs"):
    """All that one step made. Also the heartbeat: an idle engine sends it with no outputs about once a second."""

    outputs: list[RequestOutput]
    stats: EngineStats


class Progress(Struct, frozen=True, tag="progress"):
    """Start-up work under way, for the progress bar."""

    stage: str
    done: int
    total: int


class RejectedChoice(Struct, frozen=True):
    """What could not serve for a component, and why."""

    name: str
    reason: str


class ResolvedRow(Struct, frozen=True):
    """One line of the table of what was asked for and what the built layers hold."""

    role: Literal["target", "draft"]
    component: str
    """attention, moe, quantization, kv_cache_dtype, load_format, dtype."""
    requested: str
    """"unset", "auto" or the name."""
    resolved: str
    source: Literal["explicit", "inherited", "auto"]
    why: str = ""
    rejected: list[RejectedChoice] = []


class KVGroup(Struct, frozen=True):
    """One group of layers that share block tables."""

    group: int
    block_size: int
    kernel_page_size: int
    num_blocks: int
    layers: int


class LoadedModel(Struct, frozen=True):
    """What was really loaded for one role."""

    role: Literal["target", "draft"]
    architecture: str
    parameters: int
    path_hash: str
    method: str = ""


class SpeculativeInfo(Struct, frozen=True):
    """How the engine drafts, as it was resolved."""

    method: str
    num_speculative_tokens: int
    """The longest draft, k."""
    adaptive: bool
    """Whether the length follows how a request's drafts fare; if not, only limits and a schedule shorten them."""
    synthetic: bool
    """Whether drafts are accepted by lot, for benchmarks: the text is worth nothing then."""
    draft_sample_method: str = "greedy"


class EngineReady(Struct, frozen=True, tag="ready"):
    """The engine has loaded, measured and warmed up. Everything here was read back from what was built."""

    rows: list[ResolvedRow]
    kv_groups: list[KVGroup]
    models: list[LoadedModel]
    max_model_len: int
    kv_bytes: int
    device: str
    load_seconds: float
    vocab_size: int
    """Of the target's logits; token ids of requests lie below it."""
    speculative: SpeculativeInfo | None = None
    """None when the server does not speculate."""


class EngineFailed(Struct, frozen=True, tag="failed"):
    """The start failed for a reason that the user can act on; the engine exits after this."""

    message: str


FromEngine = EngineOutputs | Progress | EngineReady | EngineFailed
