"""Sampled answers with drafts are distributed as the target alone has it, token by token and jointly (case b17).

The oracle is the target in transformers over the whole tree of first tokens, shaped by definitions of our own.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from server.engine.request import Draft, Request
from server.engine.sampling.request import RequestSampling
from server.messages import EngineRequest, SamplingParams
from server.spec.verify import DrawnDraft, accept_or_resample
from tests.spec.drafts import Pair
from tests.spec.engine_harness import make_engine
from tests.spec.tiny_eagle3 import write_eagle3
from tests.spec.tiny_models import noisy_copy, write_llama

VOCAB = 32
PROMPT = [3, 14, 15, 9, 2]
NEW = 5
"""The first token comes without a draft, so with k = 3 the next three are drafted, and the fifth is the target's."""
SIGMAS = 4.0
Array = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("vocabulary-of-32")
    shape: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 1}
    target = write_llama(folder / "target", **shape)
    noisy = noisy_copy(target, folder / "noisy", 0.1)
    other = write_llama(folder / "other", seed=7, **shape)
    head = write_eagle3(target, folder / "eagle3", boundaries=(0,), captured=1, draft_vocab_size=20)
    for path in (target, noisy, other, head):
        (path / "tokenizer.json").unlink()  # it has more tokens than these models
    return {
        "noisy": Pair(target, {"method": "draft_model", "model": str(noisy)}),
        "independent": Pair(target, {"method": "draft_model", "model": str(other)}),
        "eagle3": Pair(target, {"method": "eagle3", "model": str(head)}),
        "ngram": Pair(target, {"method": "ngram", "prompt_lookup_min": 1}),
    }


@dataclass(frozen=True)
class Case:
    draft: str
    k: int
    temperature: float
    method: str = "probabilistic"
    top_p: float = 1.0

    def __str__(self) -> str:
        nucleus = f"-top_p{self.top_p}" if self.top_p < 1 else ""
        return f"{self.draft}-k{self.k}-t{self.temperature}-{self.method}{nucleus}"


QUICK = [
    Case("noisy", 3, 0.7),
    Case("noisy", 1, 1.3),
    Case("noisy", 3, 1.3, "greedy"),
    Case("independent", 3, 1.3),
    Case("independent", 1, 0.7, "greedy"),
    Case("noisy", 3, 1.3, "probabilistic", 0.8),
    Case("eagle3", 3, 0.7),
    Case("ngram", 3, 1.3, "greedy"),
]
FULL = [
    Case(draft, k, temperature, method, top_p)
    for draft in ("noisy", "independent", "eagle3")
    for k in (1, 3)
    for temperature in (0.7, 1.3)
    for method in ("greedy", "probabilistic")
    for top_p in (1.0, 0.8)
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_sampled_tokens_follow_the_target(case: Case, small: dict[str, Pair]) -> None:
    check(case, small, 1_500)


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=str)
def test_many_sampled_tokens_follow_the_target(case: Case, small: dict[str, Pair]) -> None:
    check(case, small, 20_000)


def test_the_oracle_notices_a_wrong_distribution(small: dict[str, Pair]) -> None:
    """Another temperature, and tokens that are right one by one but do not belong together."""
    tree = joint(small["noisy"].target, 1.3, 1.0)
    found = draw(Case("noisy", 3, 1.0), small, 2_000)
    assert deviation(counts(found[:, 1:2]), marginal(tree, (1,))) > SIGMAS
    found = draw(Case("noisy", 3, 1.3), small, 2_000)
    found[:, 2] = np.roll(found[:, 2], 1)
    assert deviation(counts(found[:, 2:3]), marginal(tree, (2,))) < SIGMAS
    assert deviation(counts(found[:, 1:3]), marginal(tree, (1, 2))) > SIGMAS


def test_drawn_drafts_are_accepted_and_replaced_as_the_target_has_it() -> None:
    """The rule by itself: p and q after every prefix are tables of chance, some of their entries 0."""
    vocab, n = 6, 20_000
    generator = torch.Generator().manual_seed(4)

    def table(*shape: int) -> torch.Tensor:
        weights = torch.rand(*shape, generator=generator, dtype=torch.float64) ** 2
        weights[torch.rand(*shape, generator=generator) < 0.2] = 0
        weights[..., 0] += 0.05
        return weights / weights.sum(-1, keepdim=True)

    def sample(shares: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(shares, 1, generator=generator)[:, 0]

    p = [table(vocab), table(vocab, vocab), table(vocab, vocab, vocab)]
    q = [table(vocab), table(vocab, vocab)]
    first = sample(q[0].expand(n, -1))
    second = sample(q[1][first])
    target = torch.stack((p[0].expand(n, -1), p[1][first], p[2][first, second]), 1)
    shares = torch.stack((q[0].expand(n, -1), q[1][first]), 1)
    last = sample(target[:, 2])
    drafts = []
    for i in range(n):
        params = SamplingParams(max_tokens=9, seed=i)
        request = Request(EngineRequest(i, [1], params, 0.0), RequestSampling(params, [1], vocab), 9, [1])
        draft = Draft((int(first[i]), int(second[i])), shares[i])
        drafts.append(DrawnDraft(request, draft, (-1, -1, int(last[i]))))
    gained = accept_or_resample(drafts, target.flatten(0, 1))
    assert Counter(map(len, gained)).keys() == {1, 2, 3}
    assert deviation(counts(np.array([[own[0]] for own in gained]), vocab), p[0].numpy()) < SIGMAS
    for shortest in (2, 3):
        found = counts(np.array([own[:shortest] for own in gained if len(own) >= shortest]), vocab)
        # After whatever was accepted, the next token is the target's.
        before = found.reshape(-1, vocab).sum(1, keepdims=True)
        expected = (before * p[shortest - 1].numpy().reshape(-1, vocab)).ravel()
        assert deviation(found, expected / expected.sum()) < SIGMAS


def check(case: Case, small: dict[str, Pair], samples: int) -> None:
    tree = joint(small[case.draft].target, case.temperature, case.top_p)
    found = draw(case, small, samples)
    axes = [(0,), (1,), (2,), (3,), (1, 2), (2, 3), (0, 1, 2), (1, 2, 3)]
    deviations = {which: deviation(counts(found[:, list(which)]), marginal(tree, which)) for which in axes}
    assert max(deviations.values()) < SIGMAS, deviations


def draw(case: Case, small: dict[str, Pair], samples: int) -> npt.NDArray[np.int64]:
    """The first tokens of so many answers to one prompt, [samples, 4].

    Some answers are one token shorter, so that the fourth token is the target's own after a draft of two.
    """
    pair = small[case.draft]
    speculative = pair.speculative | {"num_speculative_tokens": case.k}
    if case.draft != "ngram":
        speculative |= {"draft_sample_method": case.method}
    engine = make_engine(
        pair.target, speculative, num_kv_blocks=2_000, max_num_seqs=1_000, max_num_batched_tokens=20_000
    )
    shape = {"temperature": case.temperature, "top_p": case.top_p}
    ids = [engine.add(PROMPT, max_tokens=NEW - i % 2, **shape) for i in range(samples)]
    engine.run()
    drafted, accepted = engine.counts().drafted, engine.counts().accepted
    assert len(drafted) == case.k
    # Both ways of getting a token were taken, with a good draft at every position.
    looked_at = case.k if case.draft == "noisy" else 1
    assert all(0 < accepted[i] < drafted[i] for i in range(looked_at)), (drafted, accepted)
    return np.array([engine.tokens(request_id)[:4] for request_id in ids])


@functools.cache
@torch.no_grad()
def joint(target: Path, temperature: float, top_p: float) -> Array:
    """The probability of all first four tokens, [V, V, V, V], of which those with probability 0 are not looked into."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prefixes = torch.tensor([PROMPT])
    shares = torch.ones(1, dtype=torch.float64)
    for _ in range(4):
        parts = [model(part, use_cache=False).logits[:, -1].double() for part in prefixes.split(8192)]
        shares = (shares[:, None] * shaped(torch.cat(parts), temperature, top_p)).flatten()
        last = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat((prefixes.repeat_interleave(VOCAB, 0), last), 1)
    return shares.view([VOCAB] * 4).numpy()


def shaped(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """[R, V] -> probabilities: temperature, then the fewest most probable tokens that weigh top_p together."""
    shares = (logits / temperature).softmax(-1)
    ordered, ids = shares.sort(-1, descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    kept = torch.zeros_like(shares).scatter(-1, ids, ordered)
    return kept / kept.sum(-1, keepdim=True)


def marginal(tree: Array, which: tuple[int, ...]) -> Array:
    """Of some of the four tokens, flat."""
    return tree.sum(tuple(axis for axis in range(4) if axis not in which)).ravel()


def counts(tokens: npt.NDArray[np.int64], vocab: int = VOCAB) -> Array:
    """How often each tuple occurs, flat: [samples, n] -> [V ** n]."""
    places = tokens @ vocab ** np.arange(tokens.shape[1] - 1, -1, -1)
    return np.bincount(places, minlength=vocab ** tokens.shape[1]).astype(float)


def deviation(observed: Array, shares: Array) -> float:
    """Pearson's chi-square as standard normal deviations (Wilson and Hilferty 1931), rare cells taken together."""
    assert not observed[shares == 0].any(), "tokens that the target never gives"
    order = np.argsort(-shares, kind="stable")
    expected = shares[order] * observed.sum()
    # Cells of at least 5 expected each: neighbours in the order are joined.
    cells = np.floor(expected.cumsum() / 5).astype(int) if expected[-1] < 5 else np.arange(len(expected))
    cells = np.where(expected >= 5, np.arange(len(expected)), len(expected) + cells)
    _, cells = np.unique(cells, return_inverse=True)
    wanted, found = np.bincount(cells, expected), np.bincount(cells, observed[order])
    if wanted[-1] < 5 and len(wanted) > 1:
        wanted, found = (np.append(x[:-2], x[-2] + x[-1]) for x in (wanted, found))
    freedom = len(wanted) - 1
    assert freedom >= 1
    spread = 2 / (9 * freedom)
    square = float(((found - wanted) ** 2 / wanted).sum())
    return ((square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
