from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from server.spec.best_length import BestLength

Machine = Callable[[int, int], tuple[float, float]]
"""(running, length) -> tokens a sequence, seconds of a cycle."""


def cpu(acceptance: float, noise: random.Random | None = None) -> Machine:
    """A step that takes longer for each token beyond 8, and a draft token that costs a twelfth of a plain step."""

    def cycle(running: int, length: int) -> tuple[float, float]:
        tokens = sum(acceptance**i for i in range(length + 1))
        seconds = max(8, running * (length + 1)) / 8 + length * max(8, running) / 8 / 12
        return tokens, seconds * (noise.uniform(0.8, 1.3) if noise else 1.0)

    return cycle


def run(best: BestLength, machine: Machine, running: int, cycles: int) -> float:
    """Tokens a second of each sequence."""
    tokens = seconds = 0.0
    for _ in range(cycles):
        length = best.choose(running)
        made, took = machine(running, length)
        best.learn(running, length, round(1000 * running * made), took)
        tokens, seconds = tokens + made, seconds + took
    return tokens / seconds


def fixed(machine: Machine, running: int, length: int) -> float:
    made, took = machine(running, length)
    return made / took


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("running", [1, 2, 8, 32, 200])
def test_it_comes_close_to_the_best_fixed_length_and_never_falls_behind_none(acceptance: float, running: int) -> None:
    machine = cpu(acceptance)
    best = BestLength(3)
    run(best, machine, running, 200)
    rate = run(best, machine, running, 2000)
    assert rate > 0.97 * max(fixed(machine, running, length) for length in range(4))
    assert rate > 0.97 * fixed(machine, running, 0)


def test_noise_does_not_lead_it_astray() -> None:
    machine = cpu(0.6, random.Random(0))
    best = BestLength(3)
    run(best, machine, 32, 300)
    cycles = [machine(32, 0) for _ in range(2000)]
    plain = sum(made for made, _ in cycles) / sum(took for _, took in cycles)
    assert run(best, machine, 32, 2000) > 0.97 * plain


@pytest.mark.parametrize("catching_up", [0.02, 0.1])
def test_trials_stay_cheap_where_a_rested_draft_has_much_to_catch_up_on(catching_up: float) -> None:
    best, plain, rested = BestLength(3), cpu(0.6), 0

    def machine(running: int, length: int) -> tuple[float, float]:
        nonlocal rested
        tokens, seconds = plain(running, length)
        seconds += rested * catching_up if length else 0.0
        rested = 0 if length else min(rested + 1, 256)
        return tokens, seconds

    run(best, machine, 32, 300)
    assert run(best, machine, 32, 3000) > 0.97 * fixed(plain, 32, 0)


def test_it_follows_when_drafts_become_poor_and_good_again() -> None:
    best = BestLength(3)
    run(best, cpu(0.9), 1, 500)
    assert best.choose(1) == 3
    for acceptance in (0.01, 0.9):
        machine = cpu(acceptance)
        run(best, machine, 1, 3000)
        assert run(best, machine, 1, 1000) > 0.97 * max(fixed(machine, 1, length) for length in range(4))


def test_a_new_load_begins_with_what_was_best_at_a_smaller_one() -> None:
    best = BestLength(4)
    run(best, cpu(0.01), 8, 400)
    assert best.choose(16) == 0
    assert best.choose(1) == 4


def test_figures_of_another_length_than_the_chosen_one_count_for_nothing() -> None:
    best = BestLength(2)
    for _ in range(500):
        best.learn(1, 0, 1000, 0.001)
    assert best.choose(1) == 2
