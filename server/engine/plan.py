"""Resolve: checkpoints and settings become a frozen plan before any layer exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.locate import locate
from server.config import Settings
from server.engine.attention.base import AttentionNeed
from server.engine.attention.registry import resolve_attention_backend
from server.engine.loading.load import resolve_load_format
from server.engine.models.config import ModelConfig
from server.engine.models.family import MoEConfig
from server.engine.moe.base import MoENeed
from server.engine.moe.registry import resolve_moe_backend
from server.engine.parallel import ParallelGroup
from server.engine.setup import ModelSetup, Pages
from server.errors import UserError
from server.messages import ResolvedRow

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

# A CPU step of more tokens delays the running streams' next token for longer than it gains.
CPU_BATCHED_TOKENS = 512
CUDA_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class EnginePlan:
    """The whole engine before it is built."""

    target: ModelSetup
    max_model_len: int
    """As wished; a small KV pool may lower it."""
    max_num_batched_tokens: int


def make_plan(settings: Settings) -> EnginePlan:
    """Resolve everything that can be known without building.

    Raises:
        UserError: a setting cannot be honoured with this model on this device.
    """
    checkpoint = locate(settings.model, download_dir=Path(settings.download_dir) if settings.download_dir else None)
    config = ModelConfig.from_hf(checkpoint.config)
    device = _device(settings.device)
    group = ParallelGroup(0, settings.tensor_parallel_size)
    max_model_len = _max_model_len(settings, config)
    return EnginePlan(
        target=_target(settings, checkpoint, config, device, group),
        max_model_len=max_model_len,
        max_num_batched_tokens=_max_num_batched_tokens(settings, device, max_model_len),
    )


def _device(requested: str) -> torch.device:
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here. Use --device cpu, or auto.")
    return torch.device(requested)


def _max_model_len(settings: Settings, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    wanted = settings.max_model_len
    if wanted is not None and wanted > limit:
        raise UserError(f"--max-model-len {wanted}: the model's positions end at {limit}. Use at most {limit}.")
    return wanted or limit


def _max_num_batched_tokens(settings: Settings, device: torch.device, max_model_len: int) -> int:
    wanted = settings.max_num_batched_tokens
    if not settings.enable_chunked_prefill:
        if wanted is not None and wanted < max_model_len:
            raise UserError(
                f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least the context length "
                f"({max_model_len}), since a prompt must fit into one step; it is {wanted}."
            )
        return wanted or max_model_len
    return wanted or (CUDA_BATCHED_TOKENS if device.type == "cuda" else CPU_BATCHED_TOKENS)


def _target(
    settings: Settings, checkpoint: Checkpoint, config: ModelConfig, device: torch.device, group: ParallelGroup
) -> ModelSetup:
    dtype, dtype_why = _dtype(settings.dtype, checkpoint)
    need = AttentionNeed(device, dtype, dtype, config.num_heads, config.num_kv_heads, config.head_dim)
    attention = resolve_attention_backend(settings.attention_backend, need)
    moe = None
    if config.moe is not None:
        moe = resolve_moe_backend(settings.moe_backend, _moe_need(config.moe, config, device, dtype, group))
    elif settings.moe_backend not in (None, "auto"):
        raise UserError(
            f"--moe-backend {settings.moe_backend}: {config.architecture} has no experts, so the setting would do "
            "nothing. Leave it out."
        )
    load_format = resolve_load_format(checkpoint, settings.load_format)
    rows = [
        _row("dtype", settings.dtype, str(dtype).removeprefix("torch."), dtype_why),
        _row("attention", settings.attention_backend, attention.name, attention.why),
        _row("kv_cache_dtype", None, str(dtype).removeprefix("torch."), "the model's dtype"),
        _row("load_format", settings.load_format, load_format, "what the files are"),
        _row("quantization", None, "none", "weights are held in the model's dtype"),
        _row("execution", "eager" if settings.enforce_eager else None, "eager", "no graphs are captured"),
    ]
    if moe is not None:
        rows.append(_row("moe", settings.moe_backend, moe.name, moe.why))
    return ModelSetup(
        role="target",
        checkpoint=checkpoint,
        config=config,
        device=device,
        dtype=dtype,
        kv_dtype=dtype,
        attention=attention.name,
        moe=moe.name if moe else None,
        load_format=load_format,
        seed=settings.seed,
        group=group,
        pages=Pages(settings.block_size, settings.block_size),
        rows=tuple(rows),
    )


def _moe_need(
    moe: MoEConfig, config: ModelConfig, device: torch.device, dtype: torch.dtype, group: ParallelGroup
) -> MoENeed:
    width = group.split(moe.intermediate_size, "moe_intermediate_size")
    return MoENeed(device, dtype, moe.num_experts, moe.top_k, config.hidden_size, width)


def _dtype(requested: str, checkpoint: Checkpoint) -> tuple[torch.dtype, str]:
    if requested != "auto":
        return DTYPES[requested], "asked for"
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if checkpoint.format == "gguf" and named is None:
        return torch.bfloat16, "GGUF blocks are dequantised"
    if named is None:
        return torch.bfloat16, "the checkpoint names none"
    if named not in DTYPES:
        raise UserError(f"the checkpoint's dtype is {named!r}. Choose --dtype {', '.join(DTYPES)}.")
    return DTYPES[named], "the checkpoint's"


def _row(component: str, requested: str | None, resolved: str, why: str) -> ResolvedRow:
    explicit = requested not in (None, "auto")
    return ResolvedRow(
        role="target",
        component=component,
        requested=requested or "unset",
        resolved=resolved,
        source="explicit" if explicit else "auto",
        why="asked for" if explicit else why,
    )
