"""Every setting of the server: one frozen tree, the same for flags, variables, the YAML file and the engine.

This module only says what the settings are. `server.config_sources` reads them from the outside world; the engine
process gets the resolved tree as JSON and reads it with `Settings.model_validate_json`, so it looks at no flag and
no variable.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from server.config_flag import Flag
from server.setting_values import (
    ATTENTION_NAMES,
    MOE_NAMES,
    backend_name,
    dtype_name,
    http_url,
    kv_dtype_name,
    lower,
    multiple_of_16,
    one_rank,
    origin,
    path_prefix,
    several,
)
from server.sizes import parse_size
from server.spec.settings import SpeculativeSettings


class Settings(BaseModel):
    """The resolved settings of one server. Sizes are bytes, times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    model: Annotated[
        str | None,
        Flag(
            "model",
            "A folder, a .gguf file or a Hugging Face hub id.",
            "MODEL",
            unset="the embedded default, SmolLM2-135M-Instruct",
            positional=True,
        ),
    ] = None

    host: Annotated[
        str, Field(min_length=1), Flag("server", "Address to listen on; 0.0.0.0 for every interface.", "ADDRESS")
    ] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535), Flag("server", "Port to listen on; 0 picks a free one.", "PORT")] = 8000
    api_key: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(several),
        Flag(
            "server",
            "A key that clients must send as a bearer token; may be given several times. "
            "OUTRIDER_API_KEY takes several, separated by commas or as a JSON list, and keeps them out of `ps`.",
            "KEY",
            unset="no authentication",
            repeated=True,
        ),
    ] = ()
    served_model_name: Annotated[
        str | None,
        Field(min_length=1),
        Flag("server", "The model's name in the API and in metrics.", "NAME", unset="MODEL as given"),
    ] = None
    root_path: Annotated[
        str,
        AfterValidator(path_prefix),
        Flag("server", "Path prefix under which a proxy serves this server, such as /llm.", "PATH"),
    ] = ""
    drain_timeout: Annotated[
        float,
        Field(ge=0),
        Flag("server", "How long open requests may go on after SIGTERM before they are aborted.", "SECONDS"),
    ] = 30.0
    engine_timeout: Annotated[
        float,
        Field(ge=2),
        Flag("server", "/health answers 503 after the engine process was silent for so long.", "SECONDS"),
    ] = 60.0
    max_queued_requests: Annotated[
        int,
        Field(ge=1),
        Flag("server", "Sequences that may wait beyond --max-num-seqs before requests get 429.", "COUNT"),
    ] = 1024
    playground: Annotated[bool, Flag("server", "Serve a page at / on which to try the model.")] = True
    max_queued_tokens: Annotated[
        int | None,
        Field(ge=1),
        Flag(
            "server", "Prompt tokens that may wait for their first token before requests get 429.", "COUNT", "no limit"
        ),
    ] = None
    max_inflight_per_key: Annotated[
        int | None,
        Field(ge=1),
        Flag("server", "Requests of one --api-key that may be open before further ones get 429.", "COUNT", "no limit"),
    ] = None
    sse_keep_alive: Annotated[
        float,
        Field(ge=0),
        Flag(
            "server", "A stream that has nothing to say for so long sends a comment, for proxies; 0: none.", "SECONDS"
        ),
    ] = 15.0
    send_timeout: Annotated[
        float,
        Field(gt=0),
        Flag("server", "A client that reads nothing for so long, while its answer waits, is cut off.", "SECONDS"),
    ] = 60.0
    allowed_origins: Annotated[
        tuple[Annotated[str, AfterValidator(origin)], ...],
        BeforeValidator(several),
        Flag(
            "server",
            "A web origin whose pages may call this server (CORS), such as https://chat.example, or *; may be given "
            "several times.",
            "ORIGIN",
            unset="none",
            repeated=True,
        ),
    ] = ()
    ssl_certfile: Annotated[
        str | None, Flag("server", "Serve HTTPS with this certificate chain (PEM).", "FILE", "plain HTTP")
    ] = None
    ssl_keyfile: Annotated[
        str | None, Flag("server", "Its private key (PEM, no password).", "FILE", "in --ssl-certfile")
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        Flag("server", "Let in only clients with a certificate of these authorities (PEM).", "FILE", "everyone"),
    ] = None

    tokenizer: Annotated[
        str | None,
        Flag("model", "Take the tokenizer from this folder, .gguf file or hub id.", "TOKENIZER", unset="MODEL's own"),
    ] = None
    chat_template: Annotated[
        str | None, Flag("model", "A Jinja file that replaces the model's chat template.", "FILE", unset="MODEL's own")
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "none"],
        BeforeValidator(lower),
        Flag("model", "How the model writes tool calls; auto sees it in the chat template."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "think", "none"],
        BeforeValidator(lower),
        Flag(
            "model",
            "think: what stands between <think> and </think> is reasoning_content; auto sees it in the chat template.",
        ),
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "none"],
        BeforeValidator(lower),
        Flag("model", "auto: sampling defaults come from MODEL's generation_config.json; none: from the API alone."),
    ] = "auto"
    download_dir: Annotated[
        str | None,
        Flag("model", "Where hub downloads are kept.", "FOLDER", unset="the Hugging Face cache"),
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        BeforeValidator(dtype_name),
        Flag("model", "Type that weights and activations are computed in; auto decides by checkpoint and device."),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        BeforeValidator(lower),
        Flag("model", "Format of the weights; auto looks at the files, dummy draws random weights from --seed."),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Field(ge=1),
        Flag("model", "Longest sequence, prompt and answer together.", "TOKENS", unset="what the model was made for"),
    ] = None
    seed: Annotated[
        int,
        Field(ge=0, le=2**63 - 1),
        Flag("model", "Seed of the random weights of --load-format dummy; a request's seed is its own.", "NUMBER"),
    ] = 0

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        BeforeValidator(lower),
        Flag("engine", "Where the model runs; auto takes a CUDA GPU when there is one."),
    ] = "auto"
    cpu_threads: Annotated[
        int | None,
        Field(ge=1, le=1024),
        Flag("engine", "Threads that compute on a CPU.", "COUNT", unset="one for each core, less one from four on"),
    ] = None
    cpu_weights: Annotated[
        Literal["auto", "packed", "16bit"],
        BeforeValidator(lower),
        Flag(
            "engine",
            "How a CPU keeps linear layers: packed as stored in 4 or 8 bits, 16bit, or auto: what is quicker here.",
        ),
    ] = "auto"
    attention_backend: Annotated[
        str | None,
        AfterValidator(backend_name(ATTENTION_NAMES)),
        Flag("engine", f"auto, {', '.join(ATTENTION_NAMES)}.", "NAME", unset="auto"),
    ] = None
    moe_backend: Annotated[
        str | None,
        AfterValidator(backend_name(MOE_NAMES)),
        Flag("engine", f"For mixture-of-experts layers: auto, {', '.join(MOE_NAMES)}.", "NAME", unset="auto"),
    ] = None
    max_num_seqs: Annotated[int, Field(ge=1), Flag("engine", "Sequences that run in one step at most.", "COUNT")] = 128
    max_num_batched_tokens: Annotated[
        int | None,
        Field(ge=1),
        Flag("engine", "Tokens that one step computes at most.", "TOKENS", unset="chosen for the device"),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, Flag("engine", "Split long prompts over several steps, beside running answers.")
    ] = True
    enable_prefix_caching: Annotated[
        bool, Flag("engine", "Keep the KV blocks of finished requests for prompts that begin the same.")
    ] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        BeforeValidator(lower),
        Flag("engine", "fcfs: first come, first served; priority: lower `priority` of the request first."),
    ] = "fcfs"
    enforce_eager: Annotated[bool, Flag("engine", "Run without captured CUDA graphs.")] = False
    tensor_parallel_size: Annotated[
        int,
        Field(ge=1),
        AfterValidator(one_rank),
        Flag("engine", "Ranks that share the model; this version runs on 1.", "COUNT"),
    ] = 1

    speculative: Annotated[
        SpeculativeSettings | None,
        Flag(
            "draft",
            "The draft's settings as a JSON object; the keys below are its keys, one flag each. null takes away what a "
            "variable or the file says. In the file it is the block `speculative`, in variables OUTRIDER_SPECULATIVE "
            "(JSON) and OUTRIDER_SPECULATIVE__KEY.",
            "JSON",
            unset="no speculation",
            name="--speculative-config",
        ),
    ] = None

    block_size: Annotated[
        int | None,
        Field(ge=16, le=4096),
        AfterValidator(multiple_of_16),
        Flag("memory", "Tokens in one KV cache block, a multiple of 16.", "TOKENS", unset="64 on CUDA, 16 on a CPU"),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "fp8"] | None,
        BeforeValidator(kv_dtype_name),
        Flag("memory", "Type of the KV cache's entries: auto is the model's dtype, fp8 e4m3 unscaled.", unset="auto"),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        BeforeValidator(lambda value: None if value is None else parse_size(value)),
        Flag("memory", "Memory of the KV cache, such as 2GiB.", "SIZE", unset="measured from free memory"),
    ] = None
    num_kv_blocks: Annotated[
        int | None,
        Field(ge=1),
        Flag("memory", "Blocks in the KV cache, instead of a size.", "COUNT", unset="measured from free memory"),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Field(gt=0, le=1),
        Flag(
            "memory",
            "Share of the device's memory that weights and KV cache may take, above 0 up to 1.",
            "SHARE",
            unset="chosen for the device",
        ),
    ] = None

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        BeforeValidator(lower),
        Flag("logging", "Least weight of a message that is logged."),
    ] = "info"
    log_format: Annotated[
        Literal["human", "json"],
        BeforeValidator(lower),
        Flag("logging", "human: lines for people; json: one object a line, the start included."),
    ] = "human"
    otlp_traces_endpoint: Annotated[
        str | None,
        AfterValidator(http_url),
        Flag(
            "logging",
            "Send a span for each request there, by OTLP over HTTP, as http://localhost:4318; needs outrider[otel].",
            "URL",
            unset="no traces",
        ),
    ] = None
    metrics_names: Annotated[
        Literal["outrider", "vllm", "both"],
        BeforeValidator(lower),
        Flag("logging", "Names on /metrics: our own, vLLM's, or both."),
    ] = "both"

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, value in values.items():
                field = cls.model_fields.get(name)
                if isinstance(value, bool) and field is not None and field.annotation is not bool:
                    raise ValueError(f"{flag_name(name)} takes no {str(value).lower()}")
        return values

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Settings:
        if self.max_inflight_per_key is not None and not self.api_key:
            raise ValueError("--max-inflight-per-key tells clients apart by their keys: give --api-key, too")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ValueError(f"{flag_name(name)} is of use only with --ssl-certfile")
        return self

    @model_validator(mode="after")
    def _one_way_to_size_the_cache(self) -> Settings:
        names = ("kv_cache_memory", "num_kv_blocks", "gpu_memory_utilization")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            flags = [flag_name(name) for name in given]
            raise ValueError(f"{' and '.join(flags)} exclude each other: each sizes the KV cache")
        return self


def flag_name(field: str) -> str:
    """The flag of a setting: max_model_len is --max-model-len."""
    return flag_of(field).name or "--" + field.replace("_", "-")


def flag_of(field: str) -> Flag:
    """The command line side of a setting.

    Raises:
        LookupError: the field of `Settings` carries none, which is a mistake in this file.
    """
    metadata: list[Any] = Settings.model_fields[field].metadata
    for entry in metadata:
        if isinstance(entry, Flag):
            return entry
    raise LookupError(f"Settings.{field} has no Flag")
