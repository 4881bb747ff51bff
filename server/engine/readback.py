"""What the built layers really hold, compared with the plan. These values, not the flags, are what users see."""

from __future__ import annotations

from server.engine.layers.attention import Attention
from server.engine.layers.linear import Linear
from server.engine.layers.moe import Experts
from server.engine.layers.norm import RMSNorm
from server.engine.models.decoder import CausalLM
from server.engine.models.eagle3 import Eagle3Draft
from server.engine.models.mtp import MTPDraft
from server.engine.runner import ModelRunner
from server.errors import UserError
from server.messages import LoadedModel, ResolvedRow


def read_back(
    runner: ModelRunner[CausalLM | Eagle3Draft | MTPDraft], method: str = ""
) -> tuple[list[ResolvedRow], LoadedModel]:
    """The rows of the plan with what the layers hold.

    Args:
        runner: a built model.
        method: how a draft drafts.

    Raises:
        UserError: a layer holds something else than the plan says; serving would hide it.
    """
    setup = runner.setup
    modules = list(runner.model.modules())
    attention = [module for module in modules if isinstance(module, Attention)]
    experts = [module for module in modules if isinstance(module, Experts)]
    formats = {module.weight_format.label for module in modules if isinstance(module, Linear | Experts)}
    held = {
        "attention": {module.backend.name for module in attention},
        "moe": {module.backend.name for module in experts},
        "dtype": {_name(module.weight.dtype) for module in modules if isinstance(module, RMSNorm)},
        "kv_cache_dtype": {_name(module.backend.need.kv_dtype) for module in attention},
        "quantization": formats,
    }
    rows = []
    for row in setup.rows:
        built = held.get(row.component, {row.resolved})
        if built != set(row.resolved.split("+")):
            raise UserError(
                f"{row.role}: {row.component} was planned as {row.resolved} and built as {', '.join(sorted(built))}. "
                "This is a fault of the server; please report it."
            )
        resolved = "+".join(sorted(built))
        rows.append(ResolvedRow(row.role, row.component, row.requested, resolved, row.source, row.why))
    config = setup.config
    architecture = (
        type(config).__name__.removesuffix("Config") if config is not setup.layers else setup.layers.architecture
    )
    parameters = runner.model.num_parameters
    return rows, LoadedModel(setup.role, architecture, parameters, setup.checkpoint.path_hash, method)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
