"""What the built layers really hold, compared with the plan. These values, not the flags, are what users see."""

from __future__ import annotations

from server.engine.layers.attention import Attention
from server.engine.layers.moe import Experts
from server.engine.runner import ModelRunner
from server.errors import UserError
from server.messages import LoadedModel, ResolvedRow


def read_back(runner: ModelRunner) -> tuple[list[ResolvedRow], LoadedModel]:
    """The rows of the plan with what the layers hold.

    Raises:
        UserError: a layer holds something else than the plan says; serving would hide it.
    """
    setup = runner.setup
    modules = list(runner.model.modules())
    held: dict[str, set[str]] = {
        "attention": {module.backend.name for module in modules if isinstance(module, Attention)},
        "moe": {module.backend.name for module in modules if isinstance(module, Experts)},
        "dtype": {_name(runner.model.embed_tokens.weight.dtype)},
        "kv_cache_dtype": {_name(module.backend.need.kv_dtype) for module in modules if isinstance(module, Attention)},
    }
    for row in setup.rows:
        built = held.get(row.component)
        if built is not None and built != {row.resolved}:
            raise UserError(
                f"{row.role}: {row.component} was planned as {row.resolved} and built as {', '.join(sorted(built))}. "
                "This is a fault of the server; please report it."
            )
    model = LoadedModel(setup.role, setup.config.architecture, runner.model.num_parameters, setup.checkpoint.path_hash)
    return list(setup.rows), model


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
