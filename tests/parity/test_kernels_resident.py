"""Kernels over the state of decoding sequences and over positions, in the interpreter, against torch's operations."""

from __future__ import annotations

import os
import secrets

import pytest
import torch
from resident_cases import accepted_by_definition, check_step, make_case, reference_verdict
from rotary_cases import check_angles

from server.engine.kv.groups import Pages

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"),
    reason="kernels are compiled here: tests/gpu compares them (or set TRITON_INTERPRET=1)",
)


@pytest.mark.parametrize("count", [1, 2, 4, 6])
@pytest.mark.parametrize("pages", [Pages(16, 16), Pages(64, 32)], ids=str)
def test_a_step(count: int, pages: Pages) -> None:
    check_step(make_case(count, pages, secrets.randbits(32)), torch.device("cpu"))


def test_accepted_drafts_by_definition() -> None:
    for seed in range(20):
        case = make_case(4, Pages(16, 16), seed)
        verdict = reference_verdict(case)
        for row in range(len(case.at)):
            accepted = accepted_by_definition(case, row)
            assert verdict.accepted[row] == accepted
            drafts = case.state.tokens[case.at[row], 1 : 1 + accepted].tolist()
            assert verdict.emitted[row, : accepted + 1].tolist() == [*drafts, int(case.sampled[row, accepted])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_angles(dtype: torch.dtype) -> None:
    check_angles(dtype, torch.device("cpu"))
    check_angles(dtype, torch.device("cpu"), scale=1.5)
