"""Which kind of draft a checkpoint is, told from its tensors; from its config only where there are none."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from server.checkpoint.tensor_header import TensorHeader
from server.engine.models.eagle3_names import canonical_name
from server.engine.models.nextn_names import nextn_layers
from server.engine.quantization.plain_headers import plain_headers
from server.errors import UserError

DraftKind = Literal["eagle3", "mtp", "draft_model"]

_SUPPORTED = "supported are EAGLE-3 heads, the MTP layers of GLM-4.5 checkpoints, and whole models"
_OTHER_MTP = re.compile(r"(model\.)?(mtp|mtp_layers)\.")
_BACKBONE = re.compile(r"(model\.|language_model\.)*layers\.\d+\.|blk\.\d+\.")
_SPECULATORS = {"peagle": "a P-EAGLE head", "dflash": "a DFlash head", "mtp": "an MTP layer as speculators writes it"}


def draft_kind(config: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> DraftKind:
    """Tell what a checkpoint drafts with.

    A whole model that has MTP layers behind it counts as "mtp": whoever wants all of it as a draft says so.

    Args:
        config: the checkpoint's.
        headers: its tensors, as `read_headers` gives them; empty without weights.

    Raises:
        UserError: a kind of draft that is not supported, or nothing that could draft.
    """
    return _from_tensors(plain_headers(headers)) if headers else _from_config(config)


def _from_tensors(headers: Mapping[str, TensorHeader]) -> DraftKind:
    if nextn_layers(headers):
        return "mtp"
    names = {canonical_name(name) for name in headers}
    found = _other_head(names)
    if found is not None:
        raise UserError(f"the draft checkpoint holds {found}, which is not supported; {_SUPPORTED}")
    if "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    if any(_BACKBONE.match(name) for name in headers):
        return "draft_model"
    listed = ", ".join(sorted(headers)[:4])
    raise UserError(f"the draft checkpoint holds tensors of no known kind of draft ({listed}, …); {_SUPPORTED}")


def _other_head(names: Collection[str]) -> str | None:
    if "fc.weight" in names:
        if "mask_hidden" in names:
            return "a head for parallel drafting (tensor mask_hidden)"
        if "hidden_norm.weight" in names:
            return "a DFlash head (tensors fc and hidden_norm)"
        if "layers.0.self_attn.kv_a_proj_with_mqa.weight" in names:
            return "an EAGLE-3 head with latent attention (tensor kv_a_proj_with_mqa)"
        if "layers.0.hidden_norm.weight" not in names:
            return "an EAGLE-1 or EAGLE-2 head (tensor fc, no hidden_norm)"
    elif any(_OTHER_MTP.match(name) for name in names) and not any(name.startswith("layers.") for name in names):
        first = min(name for name in names if _OTHER_MTP.match(name))
        return f"MTP layers of another family (tensor {first})"
    return None


def _from_config(config: Mapping[str, Any]) -> DraftKind:
    algorithm = config.get("speculators_model_type")
    named = " ".join(map(str, config.get("architectures") or []))
    if algorithm in _SPECULATORS:
        raise UserError(f"the draft is {_SPECULATORS[algorithm]}, which is not supported; {_SUPPORTED}")
    if re.search(r"dflash|peagle|medusa", named, re.IGNORECASE):
        raise UserError(f"the draft's architecture {named} is not supported; {_SUPPORTED}")
    eagle_keys = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
    if algorithm == "eagle3" or "eagle3" in named.lower() or any(config.get(key) is not None for key in eagle_keys):
        return "eagle3"
    if "eagle" in named.lower():
        raise UserError(
            f"the draft's architecture {named} is not supported (an EAGLE-1 or EAGLE-2 head?); {_SUPPORTED}"
        )
    return "mtp" if re.search(r"mtp|nextn", named, re.IGNORECASE) else "draft_model"
