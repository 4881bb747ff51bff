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
from server.messages import LoadedModel, RejectedChoice, ResolvedRow


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
    linears = [module for module in modules if isinstance(module, Linear)]
    formats = {module.kept_as for module in linears} | {module.weight_format.label for module in experts}
    held: dict[str, set[str]] = {
        "attention": {module.backend.name for module in attention},
        "moe": {module.backend.name for module in experts},
        "dtype": {_name(module.weight.dtype) for module in modules if isinstance(module, RMSNorm)},
        "kv_cache_dtype": {_name(module.backend.need.kv_dtype) for module in attention},
        "load_format": {runner.loaded_from},
        "quantization": formats,
        "cpu_weights": {form for module in linears for form in module.forms},
        "tensor_parallel_size": {str(module.context.group.size) for module in linears},
    }
    rows = []
    for row in setup.rows:
        built = held.get(row.component, {row.resolved})
        if built != set(row.resolved.split("+")):
            raise _fault(f"{row.role}: {row.component} was planned as {row.resolved}", built)
        resolved = "+".join(sorted(built))
        rejected = [RejectedChoice(name, reason) for name, reason in row.rejected]
        rows.append(ResolvedRow(row.role, row.component, row.requested, resolved, row.source, row.why, rejected))
    if experts and all(row.component != "moe" for row in rows):
        raise _fault(f"{setup.role}: no experts were planned", held["moe"])
    config = setup.config
    architecture = (
        type(config).__name__.removesuffix("Config") if config is not setup.layers else setup.layers.architecture
    )
    parameters = runner.model.num_parameters
    return rows, LoadedModel(setup.role, architecture, parameters, setup.checkpoint.path_hash, method)


def _fault(planned: str, built: set[str]) -> UserError:
    return UserError(
        f"{planned} and built as {', '.join(sorted(built)) or 'nothing'}. "
        "This is a fault of the server; please report it."
    )


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
