"""How one component of one model is resolved: the same for target and draft, with the names that the user knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from server.checkpoint.checkpoint import Checkpoint
from server.engine.attention.base import AttentionBackend, AttentionNeed, Unsupported
from server.engine.attention.registry import ALIASES, attention_backend, verdicts
from server.engine.backends import Resolution, resolve
from server.engine.check import CheckRow
from server.engine.kv.groups import common_page
from server.engine.models.config import ModelConfig
from server.engine.moe.base import MoENeed
from server.engine.moe.registry import verdicts as moe_verdicts
from server.engine.parallel import ParallelGroup
from server.engine.quantization.format import UNQUANTIZED, WeightFormat
from server.errors import UserError

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

KV_DTYPES: Mapping[str, torch.dtype] = {**DTYPES, "fp8": torch.float8_e4m3fn}
"""What a KV cache may hold."""


@dataclass(frozen=True)
class Ask:
    """What was asked for one component of one role, and by which setting."""

    role: Literal["target", "draft"]
    component: str
    setting: str
    """As the user writes it, such as "--moe-backend" or "speculative_config.moe_backend"."""
    requested: str | None
    inherited: str | None = None
    """The target's request, for a draft's setting that is unset and inherits."""

    @property
    def effective(self) -> str | None:
        """The request that counts."""
        return self.requested if self.requested is not None else self.inherited

    @property
    def takes_over(self) -> bool:
        """Whether the target's named choice holds because nothing else was said."""
        return self.requested is None and self.inherited not in (None, "auto")

    def row(self, resolved: str, why: str, rejected: Iterable[tuple[str, str]] = ()) -> CheckRow:
        """The line of the table."""
        source: Literal["explicit", "inherited", "auto"] = "auto"
        if self.takes_over:
            source, why = "inherited", f"unset, so it inherits the target's request {self.inherited!r}"
        elif self.requested not in (None, "auto"):
            source, why = "explicit", "asked for"
        return CheckRow(self.role, self.component, self.requested or "unset", resolved, source, why, tuple(rejected))

    def resolve(self, verdicts: Mapping[str, Unsupported | None], aliases: Mapping[str, str]) -> Resolution:
        """Pick a backend.

        Raises:
            UserError: naming role, setting, value, reason and what would work; for an inherited choice also the
                draft's own setting, which is the way out.
        """
        name = self.effective
        if self.takes_over and name is not None:
            verdict = verdicts.get(name)
            if verdict is not None:
                able = ", ".join(other for other, reason in verdicts.items() if reason is None)
                raise UserError(
                    f"{self.role}: {self.setting} is unset, so it inherits the target's {name!r}, which cannot serve "
                    f"the draft: {verdict.reason}. Set {self.setting} to auto"
                    + (f" or one of: {able}." if able else "; no backend of this build would work.")
                )
        return resolve(f"{self.role}: {self.setting}", name, verdicts, aliases)


def resolve_attention(
    ask: Ask, need: AttentionNeed, block_size: int, sharing: Sequence[type[AttentionBackend]] = ()
) -> Resolution:
    """Choose among the backends that can serve the layers and read the cache.

    Args:
        ask: the request.
        need: the layers'.
        block_size: tokens a block.
        sharing: backends of the layers that are in the same KV group already.

    Raises:
        UserError: see `Ask.resolve`.
    """
    found = {
        name: verdict if verdict is not None else _sharing_problem(attention_backend(name), block_size, sharing)
        for name, verdict in verdicts(need).items()
    }
    return ask.resolve(found, ALIASES)


def _sharing_problem(
    backend: type[AttentionBackend], block_size: int, sharing: Sequence[type[AttentionBackend]]
) -> Unsupported | None:
    for other in sharing:
        if other.kv_layout != backend.kv_layout:
            return Unsupported(
                f"its KV layout is {backend.kv_layout}, and the target's {other.name} keeps the same group as "
                f"{other.kv_layout}"
            )
    if common_page(block_size, [backend, *sharing]) is None:
        sides = "".join(f", the target's {other.name} {other.kernel_pages}" for other in sharing)
        return Unsupported(
            f"no page size that divides --block-size {block_size} suits all: it reads pages of {backend.kernel_pages} "
            f"tokens{sides}"
        )
    return None


def resolve_moe(ask: Ask, needs: Sequence[MoENeed]) -> Resolution:
    """Choose a backend that can serve all the model's experts.

    Raises:
        UserError: see `Ask.resolve`.
    """
    return ask.resolve(moe_verdicts(needs), {})


def moe_needs(
    config: ModelConfig, formats: Iterable[WeightFormat], device: torch.device, dtype: torch.dtype, group: ParallelGroup
) -> list[MoENeed]:
    """What a model's experts ask of their backend, one need for each way in which they are stored; none without."""
    moe = config.moe
    if moe is None or not moe.layers:
        return []
    width = group.split(moe.intermediate_size, "moe_intermediate_size")
    return [
        MoENeed(device, dtype, moe.num_experts, moe.top_k, config.hidden_size, width, weights)
        # Experts that the checkpoint lacks count as unquantised; loading will say which tensors are missing.
        for weights in sorted(formats, key=lambda weights: weights.label) or [UNQUANTIZED]
    ]


def refuse_moe_backend_without_experts(ask: Ask, architecture: str) -> None:
    """An explicit choice that would do nothing stops the start.

    Raises:
        UserError: one was made.
    """
    if ask.requested not in (None, "auto"):
        raise UserError(
            f"{ask.role}: {ask.setting} {ask.requested}: {architecture} has no experts, so the setting would do "
            "nothing. Leave it out."
        )


def resolve_dtype(requested: str, checkpoint: Checkpoint) -> tuple[torch.dtype, str]:
    """The dtype that a model computes in, and why.

    Raises:
        UserError: the checkpoint's is none that is supported, and none was asked for.
    """
    if requested != "auto":
        return DTYPES[requested], "asked for"
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if named is None:
        return torch.bfloat16, "the checkpoint names none"
    if named not in DTYPES:
        raise UserError(f"the checkpoint's dtype is {named!r}. Choose --dtype {', '.join(DTYPES)}.")
    return DTYPES[named], "the checkpoint's"


def plain_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
