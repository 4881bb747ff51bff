"""Resolve: checkpoints and settings become a frozen plan before any layer exists."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.locate import locate
from server.config import Settings
from server.engine.attention.registry import attention_backend
from server.engine.capturable import capture_problem
from server.engine.check import CheckReport, CheckRow
from server.engine.check_tensors import check_tensors
from server.engine.components import (
    KV_DTYPES,
    Ask,
    moe_needs,
    plain_name,
    refuse_moe_backend_without_experts,
    resolve_attention,
    resolve_dtype,
    resolve_moe,
)
from server.engine.cpu.resolve import resolve_forms
from server.engine.kv.groups import GroupMember, KVGroupPlan, Pages, group_layers
from server.engine.loading.load import resolve_load_format
from server.engine.models.config import ModelConfig
from server.engine.models.linear_names import target_modules
from server.engine.parallel import ParallelGroup
from server.engine.quantization.resolve import resolve_formats
from server.engine.setup import ModelSetup, attention_need
from server.errors import UserError
from server.messages import KVGroup
from server.spec.draft_plan import DraftPlan
from server.spec.setup import TargetRequests, plan_draft

# On a CPU, a step of more tokens delays the running streams' next token for longer than it gains.
CPU_BATCHED_TOKENS = 1024
CUDA_BATCHED_TOKENS = 8192
CPU_BLOCK, CUDA_BLOCK = 16, 64
"""Tokens. Triton's attention reads longer runs from larger pages; the CPU's copies them whole, used or not."""


@dataclass(frozen=True)
class EnginePlan:
    """The whole engine before it is built."""

    target: ModelSetup
    draft: DraftPlan | None
    kv_groups: tuple[KVGroupPlan, ...]
    max_model_len: int
    """As wished; a small KV pool may lower it."""
    max_num_batched_tokens: int
    block_size: int

    def pages(self, role: str) -> Pages:
        """How the cache of a role's layers is cut."""
        return next(group.pages for group in self.kv_groups if any(member.role == role for member in group.members))


def make_plan(settings: Settings) -> EnginePlan:
    """Resolve everything that can be known without building.

    Raises:
        UserError: a setting cannot be honoured with these models on this device.
    """
    checkpoint = locate(settings.model, download_dir=Path(settings.download_dir) if settings.download_dir else None)
    target = _target(settings, checkpoint, _device(settings.device))
    max_model_len = _max_model_len(settings, target.layers)
    block_size = _block_size(settings, target.device)
    draft = None
    if settings.speculative is not None:
        requests = TargetRequests(
            moe_backend=settings.moe_backend,
            kv_cache_dtype=settings.kv_cache_dtype,
            load_format=settings.load_format,
            download_dir=settings.download_dir,
            block_size=block_size,
            max_model_len=max_model_len,
            tokenizer=settings.tokenizer,
        )
        draft = plan_draft(target, requests, settings.speculative)
    setups = [target, draft.setup] if draft is not None and draft.setup is not None else [target]
    members = [
        GroupMember(setup.role, setup.need, attention_backend(setup.attention), setup.layers.num_layers)
        for setup in setups
    ]
    return EnginePlan(
        target=target,
        draft=draft,
        kv_groups=tuple(group_layers(members, block_size)),
        max_model_len=max_model_len,
        max_num_batched_tokens=_max_num_batched_tokens(settings, target.device, max_model_len),
        block_size=block_size,
    )


def check_plan(settings: Settings) -> CheckReport:
    """What `make_plan` makes of the settings, or why it cannot; of weights only headers are read."""
    try:
        plan = make_plan(settings)
        check_tensors(plan.target, plan.draft)
    except UserError as error:
        return CheckReport(ok=False, errors=(str(error),))
    rows = plan.target.rows
    if plan.draft is not None:
        rows += (plan.draft.setup.rows if plan.draft.setup is not None else ()) + plan.draft.rows
    return CheckReport(ok=True, rows=rows, kv_groups=tuple(kv_group_rows(plan, num_blocks=0)))


def kv_group_rows(plan: EnginePlan, num_blocks: int) -> list[KVGroup]:
    """The groups for the table and for /metrics; `num_blocks` is 0 before the cache is sized."""
    return [
        KVGroup(
            index,
            group.pages.block_size,
            group.pages.page_size,
            num_blocks,
            sum(member.num_layers for member in group.members),
        )
        for index, group in enumerate(plan.kv_groups)
    ]


def _device(requested: str) -> torch.device:
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here. Use --device cpu, or auto.")
    return torch.device(requested)


def _block_size(settings: Settings, device: torch.device) -> int:
    return settings.block_size or (CUDA_BLOCK if device.type == "cuda" else CPU_BLOCK)


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


def _execution_row(settings: Settings, device: torch.device, attention: str, moe: str | None) -> CheckRow:
    ask = Ask("target", "execution", "--enforce-eager", "eager" if settings.enforce_eager else None)
    problem = capture_problem(device, attention, moe)
    if settings.enforce_eager or problem is not None:
        return ask.row("eager", problem or "asked for")
    return ask.row("cuda_graphs", "no backend waits for the device")


def _target(settings: Settings, checkpoint: Checkpoint, device: torch.device) -> ModelSetup:
    """The target's setup: a function of the target's own settings alone, so that no draft can change it."""
    config = ModelConfig.from_hf(checkpoint.config)
    group = ParallelGroup(0, settings.tensor_parallel_size)
    dtype, dtype_why = resolve_dtype(settings.dtype, checkpoint)
    kv_dtype = dtype if settings.kv_cache_dtype in (None, "auto") else KV_DTYPES[settings.kv_cache_dtype]
    load_format = resolve_load_format(checkpoint, settings.load_format)
    forms_row, forms = resolve_forms(settings.cpu_weights, checkpoint, config, device, dtype, load_format)
    formats = resolve_formats(checkpoint, config, keep_blocks=forms.packed and load_format != "dummy")
    own = target_modules(config)
    attention_ask = Ask("target", "attention", "--attention-backend", settings.attention_backend)
    need = attention_need(config, device, dtype, kv_dtype)
    attention = resolve_attention(attention_ask, need, _block_size(settings, device))
    labels = "+".join(sorted(formats.labels(own)))
    rows = [
        Ask("target", "dtype", "--dtype", settings.dtype).row(plain_name(dtype), dtype_why),
        attention_ask.row(attention.name, attention.why, attention.rejected),
        Ask("target", "kv_cache_dtype", "--kv-cache-dtype", settings.kv_cache_dtype).row(
            plain_name(kv_dtype), "the model's dtype"
        ),
        Ask("target", "load_format", "--load-format", settings.load_format).row(load_format, "what the files are"),
        Ask("target", "quantization", "", None).row(labels, formats.why(own)),
        *forms_row,
    ]
    moe_ask = Ask("target", "moe", "--moe-backend", settings.moe_backend)
    needs = moe_needs(config, formats.experts(own), device, dtype, group)
    moe = None
    if needs:
        moe = resolve_moe(moe_ask, needs)
        rows.append(moe_ask.row(moe.name, moe.why, moe.rejected))
    else:
        refuse_moe_backend_without_experts(moe_ask, config.architecture)
    rows.append(_execution_row(settings, device, attention.name, moe.name if moe else None))
    return ModelSetup(
        role="target",
        checkpoint=checkpoint,
        config=config,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention=attention.name,
        moe=moe.name if moe else None,
        formats=formats,
        load_format=load_format,
        seed=settings.seed,
        group=group,
        forms=forms,
        rows=tuple(rows),
    )
