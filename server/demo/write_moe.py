"""Writes the demonstration's mixture of experts as a checkpoint folder, with its trained MTP layer if packaged."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from server.checkpoint.locate import locate
from server.checkpoint.packaged_heads import DEMO_MOE_HEAD, packaged_head
from server.checkpoint.tokenizer import load_tokenizer
from server.demo.upcycled import upcycled_config, upcycled_tensors
from server.engine.loading.save import save_tensors
from server.engine.quantization.write import write_quantized
from server.errors import UserError

ExpertType = Literal["bf16", "int4", "fp8"]
EXPERT_TYPES: tuple[ExpertType, ...] = ("bf16", "int4", "fp8")

_SCHEMES = {"int4": "int4_g64", "fp8": "fp8_channel"}
_EXPERTS = r"re:model\.layers\.\d+\.mlp\.experts\..*"


def write_moe(out: Path, experts: ExpertType) -> bool:
    """Make the folder: about 600 MB with bf16 experts, 370 MB with int4 ones.

    Args:
        out: may exist if it is empty.
        experts: how the target's experts are stored; all else, the MTP layer's experts too, is bf16.

    Returns:
        Whether it has an MTP layer.

    Raises:
        UserError: `out` holds something, or the embedded model is not installed.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: exists and is not an empty folder")
    if experts == "bf16":
        return bool(_write_plain(out)["num_nextn_predict_layers"])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        plain = Path(folder) / "plain"
        config = _write_plain(plain)
        mtp = rf"re:model\.layers\.{config['num_hidden_layers']}\..*"
        write_quantized(plain, out, [(_EXPERTS, _SCHEMES[experts])], ignore=("lm_head", mtp))
    return bool(config["num_nextn_predict_layers"])


def _write_plain(folder: Path) -> dict[str, Any]:
    """Everything in bf16; returns the config."""
    checkpoint = locate(None)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(upcycled_tensors(checkpoint))
    head = packaged_head(DEMO_MOE_HEAD)
    if head is not None:
        with safe_open(head / "model.safetensors", "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
        shutil.copyfile(head / "README.md", folder / "MTP.md")
    save_tensors(tensors, folder / "model.safetensors")
    config = upcycled_config(dict(checkpoint.config), 1 if head is not None else 0)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    files = load_tokenizer(checkpoint)
    files.tokenizer.save(str(folder / "tokenizer.json"))
    texts = {**files.special_tokens, "chat_template": files.chat_templates["default"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts, indent=2) + "\n")
    return config
