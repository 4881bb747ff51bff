"""The one place where a draft's setup is made from the target's and the draft's own settings, for all methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from pydantic import ValidationError

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.headers import read_headers
from server.checkpoint.locate import ignoring, locate
from server.checkpoint.tensor_header import TensorHeader
from server.engine.attention.registry import attention_backend
from server.engine.check import CheckRow
from server.engine.components import (
    KV_DTYPES,
    Ask,
    moe_needs,
    plain_name,
    refuse_moe_backend_without_experts,
    resolve_attention,
    resolve_moe,
)
from server.engine.loading.load import resolve_load_format
from server.engine.models.config import ModelConfig
from server.engine.models.draft_kind import draft_kind
from server.engine.models.lending import borrowing
from server.engine.models.recurrent import RecurrentConfig, read_recurrent_config
from server.engine.parallel import ParallelGroup
from server.engine.setup import ModelSetup, attention_need
from server.errors import UserError
from server.spec.draft_formats import check_quantization, draft_formats
from server.spec.draft_forms import draft_forms
from server.spec.draft_plan import DraftPlan
from server.spec.drafting import check_rules, draft_max_model_len, is_adaptive, num_tokens, synthetic_acceptance
from server.spec.rows import drafting_rows, lookup_rows, method_row, model_rows, packaged_rows
from server.spec.settings import KEY, NGRAM_TOKENS, Method, SpeculativeSettings
from server.spec.vocabulary import check_tokens_of_head, shared_vocab_size


@dataclass(frozen=True)
class TargetRequests:
    """What the user asked for the target where an unset draft setting inherits the request."""

    moe_backend: str | None
    kv_cache_dtype: str | None
    load_format: str
    download_dir: str | None
    block_size: int
    max_model_len: int
    tokenizer: str | None = None


def plan_draft(target: ModelSetup, requests: TargetRequests, settings: SpeculativeSettings) -> DraftPlan:
    """Resolve the draft, jointly with a target that is settled and stays as it is.

    Raises:
        UserError: naming role, key, value, reason and what would work.
    """
    if settings.method == "ngram":
        return _ngram(target, requests, settings)
    checkpoint = _locate(target, requests, settings)
    ask = Ask("draft", "load_format", KEY + "load_format", settings.load_format, requests.load_format)
    load_format = _load_format(ask, checkpoint)
    headers, kind = _tensors(checkpoint)
    asked, method = settings.method, settings.method or kind
    if method == "draft_model" and kind == "eagle3":
        raise UserError(
            f"draft: {KEY}method draft_model: {checkpoint.source} is an EAGLE-3 head, not a whole model. "
            f"Set {KEY}method to eagle3, or leave it out."
        )
    settings = _with_method(settings, method)
    config = _config(method, checkpoint, headers, target, settings)
    setup = _setup(target, requests, settings, method, checkpoint, config, ask.row(load_format, "what the files are"))
    max_model_len, len_row = draft_max_model_len(requests.max_model_len, settings, setup.layers)
    k, why = num_tokens(settings, checkpoint, method)
    check_rules(settings, k)
    return DraftPlan(
        method=method,
        num_tokens=k,
        adaptive=is_adaptive(settings),
        rules=settings.num_speculative_tokens_per_batch_size or (),
        setup=setup,
        capture=() if isinstance(config, ModelConfig) else config.capture,
        max_model_len=max_model_len,
        shared_vocab_size=_shared_vocab_size(target, setup, requests),
        probabilistic=settings.draft_sample_method == "probabilistic",
        synthetic=synthetic_acceptance(settings, k),
        lookup=(settings.lookup_min, settings.lookup_max),
        rows=(
            method_row(asked, method, config),
            *packaged_rows(settings),
            *drafting_rows(settings, k, why),
            len_row,
            *model_rows(settings, config),
        ),
    )


def _ngram(target: ModelSetup, requests: TargetRequests, settings: SpeculativeSettings) -> DraftPlan:
    k = settings.num_speculative_tokens or NGRAM_TOKENS
    check_rules(settings, k)
    return DraftPlan(
        method="ngram",
        num_tokens=k,
        adaptive=is_adaptive(settings),
        rules=settings.num_speculative_tokens_per_batch_size or (),
        setup=None,
        capture=(),
        max_model_len=requests.max_model_len,
        shared_vocab_size=target.layers.vocab_size,
        probabilistic=False,
        synthetic=synthetic_acceptance(settings, k),
        lookup=(settings.lookup_min, settings.lookup_max),
        rows=(
            method_row(settings.method, "ngram", None),
            *drafting_rows(settings, k, "the default of ngram"),
            *lookup_rows(settings),
        ),
    )


def _locate(target: ModelSetup, requests: TargetRequests, settings: SpeculativeSettings) -> Checkpoint:
    patterns = settings.ignore_patterns
    if settings.model is None:
        if settings.download_dir not in (None, "auto"):
            raise UserError(
                f"draft: {KEY}download_dir {settings.download_dir}: without {KEY}model the draft lies in the target's "
                "checkpoint, so nothing is downloaded for it. Leave it out."
            )
        return target.checkpoint if patterns is None else ignoring(target.checkpoint, patterns)
    folder = requests.download_dir if settings.download_dir is None else settings.download_dir
    path = None if folder in (None, "auto") else Path(folder)
    try:
        return locate(settings.model, download_dir=path, ignore_patterns=patterns or ())
    except UserError as error:
        raise UserError(f"draft: {KEY}model {settings.model!r}: {error}") from None


def _shared_vocab_size(target: ModelSetup, draft: ModelSetup, requests: TargetRequests) -> int:
    if isinstance(draft.config, ModelConfig):
        return shared_vocab_size(target, draft, requests.tokenizer, requests.download_dir)
    if draft.checkpoint.path != target.checkpoint.path:
        check_tokens_of_head(target, draft, requests.tokenizer, requests.download_dir)
    return target.layers.vocab_size


def _tensors(checkpoint: Checkpoint) -> tuple[Mapping[str, TensorHeader], Method]:
    """The checkpoint's tensors, and what they draft with."""
    try:
        headers = read_headers(checkpoint)
        return headers, draft_kind(checkpoint.config, headers)
    except UserError as error:
        raise UserError(f"draft: {KEY}model {checkpoint.source}: {error}") from None


def _load_format(ask: Ask, checkpoint: Checkpoint) -> str:
    wanted = ask.effective or "auto"
    try:
        return resolve_load_format(checkpoint, wanted, ask.setting)
    except UserError as error:
        if checkpoint.format == "config" and checkpoint.ignore_patterns:
            left_out = f"{KEY}ignore_patterns {list(checkpoint.ignore_patterns)}"
            raise UserError(f"draft: {left_out}: with these left aside, {error}. Leave some in.") from None
        if wanted == "auto":
            raise UserError(f"draft: {KEY}model {checkpoint.source}: {error}") from None
        said = f"is unset, so it inherits the target's {wanted!r}" if ask.takes_over else repr(wanted)
        raise UserError(f"draft: {ask.setting} {said}: {error}. Set {ask.setting} to auto or to what it is.") from None


def _with_method(settings: SpeculativeSettings, method: Method) -> SpeculativeSettings:
    """The settings with the inferred method, so that keys of other methods are refused for it, too."""
    if settings.method is not None:
        return settings
    try:
        return SpeculativeSettings.model_validate({**settings.model_dump(exclude_none=True), "method": method})
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise UserError(f"draft: {KEY}{message} (the method is {method}, as its checkpoint says)") from None


def _config(
    method: Method,
    checkpoint: Checkpoint,
    headers: Mapping[str, TensorHeader],
    target: ModelSetup,
    settings: SpeculativeSettings,
) -> ModelConfig | RecurrentConfig:
    try:
        if method == "draft_model":
            return borrowing(ModelConfig.from_hf(checkpoint.config), headers, target.layers)
        kind = cast(Literal["eagle3", "mtp"], method)
        aux = settings.aux_hidden_state_layers
        return read_recurrent_config(kind, checkpoint.config, headers, target.layers, aux)
    except UserError as error:
        raise UserError(f"draft: {KEY}method {method}, model {checkpoint.source}: {error}") from None


def _setup(
    target: ModelSetup,
    requests: TargetRequests,
    settings: SpeculativeSettings,
    method: Method,
    checkpoint: Checkpoint,
    config: ModelConfig | RecurrentConfig,
    load_row: CheckRow,
) -> ModelSetup:
    """The draft's ModelSetup. What is taken from the target is visible here and nowhere else."""
    layers = config if isinstance(config, ModelConfig) else config.model
    dtype, device = target.dtype, target.device
    why = "a draft has no key of its own for it" if isinstance(config, ModelConfig) else "hidden states cross over"
    group = _parallel_group(target, settings)
    found = draft_formats(checkpoint, config, keep_blocks=target.forms.packed and load_row.resolved != "dummy")
    quantization_ask = Ask("draft", "quantization", KEY + "quantization", settings.quantization)
    check_quantization(quantization_ask, found)
    kept = draft_forms(target.forms, config, found, settings.quantization)

    kv_ask = Ask("draft", "kv_cache_dtype", KEY + "kv_cache_dtype", settings.kv_cache_dtype, requests.kv_cache_dtype)
    kv_name = kv_ask.effective or "auto"
    kv_dtype = dtype if kv_name == "auto" else KV_DTYPES[kv_name]

    attention_ask = Ask("draft", "attention", KEY + "attention_backend", settings.attention_backend)
    need = attention_need(layers, device, dtype, kv_dtype)
    same_group = (need.num_kv_heads, need.head_dim, need.kv_dtype) == (
        target.need.num_kv_heads,
        target.need.head_dim,
        target.need.kv_dtype,
    )
    sharing = [attention_backend(target.attention)] if same_group else []
    attention = resolve_attention(attention_ask, need, requests.block_size, sharing)

    moe_ask = Ask("draft", "moe", KEY + "moe_backend", settings.moe_backend, requests.moe_backend)
    needs = moe_needs(layers, found.experts, device, dtype, group)
    moe = resolve_moe(moe_ask, needs) if needs else None
    if moe is None:
        refuse_moe_backend_without_experts(moe_ask, f"the draft {checkpoint.source}")
    rows = [
        CheckRow("draft", "dtype", "unset", plain_name(dtype), "inherited", f"the target's: {why}"),
        attention_ask.row(attention.name, attention.why, attention.rejected),
        kv_ask.row(plain_name(kv_dtype), "the draft's own dtype"),
        load_row,
        quantization_ask.row(kept.labels, kept.why),
        _group_ask(target, settings).row(str(group.size), ""),
    ]
    if moe is not None:
        rows.append(moe_ask.row(moe.name, moe.why, moe.rejected))
    return ModelSetup(
        role="draft",
        checkpoint=checkpoint,
        config=config,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention=attention.name,
        moe=moe.name if moe else None,
        formats=found.formats,
        load_format=load_row.resolved,
        # Another seed, or random weights would make the draft its target's copy.
        seed=target.seed + 1,
        group=group,
        forms=kept.forms,
        rows=tuple(rows),
    )


def _group_ask(target: ModelSetup, settings: SpeculativeSettings) -> Ask:
    key, asked = "tensor_parallel_size", settings.tensor_parallel_size
    return Ask("draft", key, KEY + key, None if asked is None else str(asked), str(target.group.size))


def _parallel_group(target: ModelSetup, settings: SpeculativeSettings) -> ParallelGroup:
    size = settings.tensor_parallel_size
    if size is not None and size not in (1, target.group.size):
        allowed = sorted({1, target.group.size})
        raise UserError(
            f"draft: {KEY}tensor_parallel_size {size}: it must be 1 or the target's, "
            f"{' or '.join(map(str, allowed))} here."
        )
    return target.group if size is None else ParallelGroup(target.group.rank if size > 1 else 0, size)
