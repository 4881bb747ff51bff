"""The draft's settings; each is unset (None), "auto" or named.

Both processes read this file, so no torch here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from server.setting_values import ATTENTION_NAMES, MOE_NAMES, backend_name, kv_dtype_name

METHODS = ("ngram", "draft_model", "eagle3", "mtp")
Method = Literal["ngram", "draft_model", "eagle3", "mtp"]

KEY = "speculative_config."
"""What goes before a setting's name in errors."""

MAX_DRAFT_TOKENS = 16
NGRAM_TOKENS = 5
NEURAL_TOKENS = 3

DRAFT_MODEL_KEYS = (
    "model",
    "moe_backend",
    "attention_backend",
    "kv_cache_dtype",
    "load_format",
    "download_dir",
    "ignore_patterns",
    "quantization",
    "tensor_parallel_size",
    "max_model_len",
    "draft_sample_method",
    "aux_hidden_state_layers",
)
"""Keys that only mean something where a draft model exists."""
NGRAM_KEYS = ("prompt_lookup_min", "prompt_lookup_max")
SYNTHETIC_KEYS = ("synthetic_acceptance_rates", "synthetic_acceptance_length")


def _lower(value: object) -> object:
    return value.lower().replace("-", "_") if isinstance(value, str) else value


def _yes_or_no(value: object) -> object:
    """Truth as JSON, YAML or a variable spells it; "auto" is the same as unset."""
    if isinstance(value, str):
        word = value.lower()
        return {"true": True, "false": False, "auto": None}.get(word, value)
    return value


def _no_patterns(value: object) -> object:
    """An empty list for "auto": all of the draft's files count."""
    return () if value in ("auto", ["auto"], ("auto",)) else value


class BatchSizeRule(BaseModel):
    """k for steps with lo to hi running sequences."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lo: Annotated[int, Field(ge=1)]
    hi: Annotated[int, Field(ge=1)]
    k: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)]

    @model_validator(mode="before")
    @classmethod
    def _from_triple(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            if len(value) != 3:
                raise ValueError(f"a rule is [lo, hi, k], three whole numbers; {list(value)!r} has {len(value)}")
            return dict(zip(("lo", "hi", "k"), value, strict=True))
        return value

    @model_validator(mode="after")
    def _in_order(self) -> BatchSizeRule:
        if self.lo > self.hi:
            raise ValueError(f"a rule [lo, hi, k] has lo ≤ hi; {self.lo} is above {self.hi}")
        return self


class SpeculativeSettings(BaseModel):
    """What the user said about the draft."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    method: Annotated[Method | None, BeforeValidator(_lower)] = None
    model: Annotated[str | None, Field(min_length=1)] = None
    num_speculative_tokens: Annotated[int | None, Field(ge=1, le=MAX_DRAFT_TOKENS)] = None
    adaptive_k: Annotated[bool | None, BeforeValidator(_yes_or_no)] = None
    moe_backend: Annotated[str | None, AfterValidator(backend_name(MOE_NAMES))] = None
    attention_backend: Annotated[str | None, AfterValidator(backend_name(ATTENTION_NAMES))] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "fp8"] | None, BeforeValidator(kv_dtype_name)
    ] = None
    load_format: Annotated[Literal["auto", "safetensors", "gguf", "dummy"] | None, BeforeValidator(_lower)] = None
    download_dir: Annotated[str | None, Field(min_length=1)] = None
    ignore_patterns: Annotated[tuple[str, ...] | None, BeforeValidator(_no_patterns)] = None
    quantization: Annotated[str | None, Field(min_length=1), BeforeValidator(_lower)] = None
    tensor_parallel_size: Annotated[int | None, Field(ge=1)] = None
    max_model_len: Annotated[int | None, Field(ge=1)] = None
    draft_sample_method: Annotated[Literal["greedy", "probabilistic"] | None, BeforeValidator(_lower)] = None
    rejection_sample_method: Annotated[Literal["standard", "synthetic"] | None, BeforeValidator(_lower)] = None
    synthetic_acceptance_rates: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = None
    synthetic_acceptance_length: Annotated[float | None, Field(ge=1, le=MAX_DRAFT_TOKENS + 1)] = None
    num_speculative_tokens_per_batch_size: tuple[BatchSizeRule, ...] | None = None
    prompt_lookup_min: Annotated[int | None, Field(ge=1, le=64)] = None
    prompt_lookup_max: Annotated[int | None, Field(ge=1, le=64)] = None
    aux_hidden_state_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None

    @model_validator(mode="after")
    def _keys_fit_the_method(self) -> SpeculativeSettings:
        if self.method is None and self.model is None:
            raise ValueError(
                f"method is missing, and there is no model to infer it from; methods: {', '.join(METHODS)}, none"
            )
        if self.method == "ngram":
            self._refuse(DRAFT_MODEL_KEYS, "method ngram has no draft model, so it would do nothing")
        elif self.method is not None:
            self._refuse(NGRAM_KEYS, f"method {self.method} looks nothing up in the prompt; it belongs to ngram")
        if self.method != "eagle3" and self.method is not None and self.aux_hidden_state_layers is not None:
            raise ValueError(
                f"aux_hidden_state_layers: method {self.method} reads no such layers; it belongs to eagle3"
            )
        if self.method in ("draft_model", "eagle3") and self.model is None:
            raise ValueError(f"model: method {self.method} needs one, a folder or a hub id")
        if self.lookup_min > self.lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.lookup_min} is above prompt_lookup_max {self.lookup_max}; set both"
            )
        return self

    @model_validator(mode="after")
    def _synthetic_has_rates(self) -> SpeculativeSettings:
        given = [key for key in SYNTHETIC_KEYS if getattr(self, key) is not None]
        if self.rejection_sample_method == "synthetic":
            if len(given) != 1:
                raise ValueError(
                    f"rejection_sample_method synthetic needs exactly one of {' and '.join(SYNTHETIC_KEYS)}"
                )
        elif given:
            raise ValueError(f"{given[0]} does nothing unless rejection_sample_method is synthetic")
        return self

    @property
    def lookup_min(self) -> int:
        """Shortest match that ngram takes."""
        return self.prompt_lookup_min if self.prompt_lookup_min is not None else 2

    @property
    def lookup_max(self) -> int:
        """Longest match that ngram looks for."""
        return self.prompt_lookup_max if self.prompt_lookup_max is not None else max(5, self.lookup_min)

    def _refuse(self, keys: tuple[str, ...], why: str) -> None:
        given = [key for key in keys if getattr(self, key) is not None]
        if given:
            raise ValueError(f"{given[0]}: {why}. Leave it out.")
