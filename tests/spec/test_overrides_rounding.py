"""A plain draft of a packed target on a CPU: rounded to 8 bits, which is told, unless its quantisation was named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.engine.quantization.write import write_quantized
from tests.spec.engine_harness import make_engine
from tests.spec.override_models import draft_runner, told
from tests.spec.tiny_models import write_glm4_moe, write_llama

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.mark.parametrize(
    ("named", "settings", "kept"),
    [
        (None, {"cpu_weights": "packed"}, "rounded_8bit"),
        ("auto", {"cpu_weights": "auto"}, "rounded_8bit"),
        ("none", {"cpu_weights": "packed"}, "none"),
        (None, {"cpu_weights": "16bit"}, "none"),
        (None, {"dtype": "float32"}, "none"),
    ],
)
def test_a_plain_draft_of_a_packed_target(
    named: str | None, settings: dict[str, Any], kept: str, tmp_path: Path
) -> None:
    plain = write_llama(tmp_path / "plain", intermediate_size=64)
    write_quantized(plain, tmp_path / "target", [("re:.*proj", "int4_g32")])
    speculative = {"method": "draft_model", "model": plain} | ({} if named is None else {"quantization": named})
    engine = make_engine(tmp_path / "target", speculative, **{"dtype": "bfloat16"} | settings)
    assert told(engine, "draft")["quantization"][1] == kept
    assert told(engine, "target")["quantization"][1] == "int4_g32+none"
    bits = {m.coded.bits for m in draft_runner(engine).model.modules() if getattr(m, "coded", None) is not None}
    assert bits == {"rounded_8bit": {8}, "none": {16} if engine.plan.target.forms.packed else set()}[kept]
    prompt = [5, 9, 200, 31, 7]
    plainly = make_engine(tmp_path / "target", **{"dtype": "bfloat16"} | settings)
    assert engine.generate([prompt], max_tokens=20) == plainly.generate([prompt], max_tokens=20)
    assert sum(engine.counts().accepted) > 0


def test_experts_are_not_rounded(tmp_path: Path) -> None:
    target = write_glm4_moe(tmp_path / "plain", intermediate_size=64, moe_intermediate_size=32)
    write_quantized(target, tmp_path / "target", [("re:.*layers\\.[012]\\..*proj", "int4_g32")])
    engine = make_engine(tmp_path / "target", {"method": "mtp"}, dtype="bfloat16", cpu_weights="packed")
    assert told(engine, "draft")["quantization"][1] == "none+rounded_8bit"


def test_odd_widths_are_not_rounded(tmp_path: Path) -> None:
    plain = write_llama(tmp_path / "plain", intermediate_size=64)
    write_quantized(plain, tmp_path / "target", [("re:.*proj", "int4_g32")])
    odd = write_llama(tmp_path / "odd", intermediate_size=48)
    draft = {"method": "draft_model", "model": odd}
    engine = make_engine(tmp_path / "target", draft, dtype="bfloat16", cpu_weights="packed")
    assert told(engine, "draft")["quantization"][1] == "none"
