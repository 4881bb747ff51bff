"""The families that this build serves."""

from __future__ import annotations

from server.engine.models.family import Family
from server.engine.models.glm4_moe import GLM4_MOE
from server.engine.models.llama import LLAMA
from server.engine.models.qwen2 import QWEN2
from server.engine.models.qwen3 import QWEN3
from server.engine.models.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {family.architecture: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GLM4_MOE)}
"""By architecture, as in config.json."""
