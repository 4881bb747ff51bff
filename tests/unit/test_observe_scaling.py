"""The simulation of replicas, against what queueing theory knows exactly."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from benchmarks.scaling import fit
from benchmarks.scaling_model import Autoscaler, Load, Replica, Service, at_random, least_loaded, simulate

ONE_AT_A_TIME = Service(base=0.01, per_row=0.0, per_prompt_token=0.0, max_num_seqs=1)


def load(rate: float, seconds: float, prompt: float = 1, answer: float = 1, *, exact: bool = True) -> Load:
    return Load(lambda _: rate, rate, seconds, prompt, answer, exact_lengths=exact)


@pytest.mark.parametrize("utilisation", [0.3, 0.7])
def test_one_at_a_time_waits_as_long_as_pollaczek_and_khinchine_say(utilisation: float) -> None:
    """M/D/1: the mean wait is u s / 2 (1 - u) for service time s."""
    outcome = simulate(ONE_AT_A_TIME, load(utilisation / 0.01, 400), 1)
    assert outcome.utilisation == pytest.approx(utilisation, rel=0.05)
    assert mean(outcome.waits) == pytest.approx(utilisation * 0.01 / 2 / (1 - utilisation), rel=0.1)


def test_littles_law() -> None:
    service = Service(0.01, 0.001, 0.0001, max_num_seqs=64)
    outcome = simulate(service, load(20, 200, 50, 40, exact=False), 2)
    assert outcome.finished == pytest.approx(20 * 200, rel=0.05)
    assert outcome.in_flight > 1
    # Tokens and first tokens of all that ended; their time in the system is what was in flight.
    assert outcome.tokens + len(outcome.first_tokens) == pytest.approx(outcome.finished * 40, rel=0.1)


def test_a_batch_is_worth_more_than_its_time() -> None:
    wide = Service(0.01, 0.0, 0.0, max_num_seqs=64)
    burst = load(400, 20, 1, 20)
    assert simulate(wide, burst, 1).finished > 10 * simulate(replace(wide, max_num_seqs=1), burst, 1).finished


def test_drafts_make_fewer_steps() -> None:
    service = Service(0.01, 0.0, 0.0, max_num_seqs=1)
    with_drafts = simulate(replace(service, tokens_per_step=2.0), load(3, 100, 1, 20), 1)
    assert with_drafts.busy_seconds == pytest.approx(
        simulate(service, load(3, 100, 1, 20), 1).busy_seconds * 11 / 20, rel=0.02
    )


def test_choosing_the_least_loaded_beats_chance() -> None:
    service = Service(0.01, 0.002, 0.0005, max_num_seqs=8)
    busy = load(13, 120, 100, 100, exact=False)
    chance, chosen = (simulate(service, busy, 4, pick) for pick in (at_random, least_loaded))
    assert chosen.first_token_quantile(0.99) < chance.first_token_quantile(0.99)


def test_a_full_cache_holds_requests_back() -> None:
    service = Service(0.01, 0.0, 0.0, max_num_seqs=64, kv_tokens=100)
    outcome = simulate(service, load(50, 20, 10, 40), 1)
    free = simulate(replace(service, kv_tokens=100_000), load(50, 20, 10, 40), 1)
    assert outcome.first_token_quantile(0.5) > 5 * free.first_token_quantile(0.5)


def test_an_autoscaler_adds_and_takes_away() -> None:
    def scale(replicas: list[Replica]) -> int:
        return max(1, sum(replica.load for replica in replicas) // 4)

    service = Service(0.01, 0.0, 0.0, max_num_seqs=8)
    wave = Load(lambda now: 40 if 50 < now < 150 else 0.1, 40, 400, 1, 50, exact_lengths=True)
    outcome = simulate(service, wave, 1, autoscaler=Autoscaler(scale, every=5, start=10))
    assert 2 < outcome.most_replicas
    assert outcome.replica_seconds < 400 * outcome.most_replicas * 0.6


def test_the_fit_finds_what_it_was_made_of() -> None:
    made = [(0.02 + 0.001 * rows + 0.0003 * prompt, rows, prompt) for rows in (1, 4, 16) for prompt in (0, 5, 80)]
    assert fit(made) == pytest.approx((0.02, 0.001, 0.0003, 0.0), abs=1e-9)
