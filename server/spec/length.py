"""How many tokens to draft: per request and per step, from 0 to k."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from server.engine.request import Request
from server.messages import RequestOutput
from server.spec.best_length import BestLength
from server.spec.estimate import AcceptanceEstimate
from server.spec.settings import BatchSizeRule


class DraftLength:
    """k fixed, by the number of running sequences, and, when adaptive, by what pays and how a request's drafts fare."""

    def __init__(self, max_tokens: int, adaptive: bool, rules: Sequence[BatchSizeRule] = ()) -> None:
        """Make the rule.

        Args:
            max_tokens: k.
            adaptive: a step's longest draft is the one that `BestLength` has found to make the most tokens a second;
                and for each request, a draft accepted whole lets the next be one longer, one of which less than half
                was accepted makes it one shorter, within 1 … k.
            rules: k by running sequences; the first that fits holds, and without one k does.
        """
        self._max_tokens = max_tokens
        self._best = BestLength(max_tokens) if adaptive else None
        self._estimate = AcceptanceEstimate(max_tokens)
        self._rules = rules
        self._lengths: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def most(self, running: int) -> int:
        """Tokens that any request may draft in a step while so many sequences run."""
        return self._max_tokens if self._best is None or not running else self._best.choose(running)

    def expected(self, output: RequestOutput) -> float:
        """Tokens that an output's step was expected to make for it, from so long a draft.

        What it did make depends on chance: over the few cycles of a trial that would hide what the length is worth.
        """
        return self._estimate.tokens(output.drafted) if output.token_ids else 0.0

    def learn(self, running: int, length: int, tokens: float, seconds: float) -> None:
        """Take in what a cycle was worth and took whose longest draft was to be `length`; see `BestLength.learn`."""
        if self._best is not None and running:
            self._best.learn(running, length, tokens, seconds)

    def wanted(self, request: Request, running: int) -> int:
        """Tokens to draft for a request while so many sequences run, where `most` allows it."""
        most = next((rule.k for rule in self._rules if rule.lo <= running <= rule.hi), self._max_tokens)
        return min(most, self._lengths.get(request, self._max_tokens))

    def observe(self, request: Request, output: RequestOutput) -> None:
        """Take note of what a verified draft came to."""
        if self._best is None or not output.drafted:
            return
        self._estimate.add(output.drafted, output.accepted)
        length = self._lengths.get(request, self._max_tokens)
        if output.accepted == output.drafted:
            length += 1
        elif 2 * output.accepted < output.drafted:
            length -= 1
        self._lengths[request] = max(1, min(self._max_tokens, length))
