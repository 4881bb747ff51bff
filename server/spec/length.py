"""How many tokens to draft: per request and per step, from 0 to k."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from server.engine.request import Request
from server.messages import RequestOutput
from server.spec.settings import BatchSizeRule


class DraftLength:
    """k fixed, by the number of running sequences, and, when adaptive, by how a request's drafts have fared."""

    def __init__(self, max_tokens: int, adaptive: bool, rules: Sequence[BatchSizeRule] = ()) -> None:
        """Make the rule.

        Args:
            max_tokens: k.
            adaptive: a draft accepted whole lets the next be one longer, one of which less than half was accepted
                makes it one shorter, within 1 … k.
            rules: k by running sequences; the first that fits holds, and without one k does.
        """
        self._max_tokens = max_tokens
        self._adaptive = adaptive
        self._rules = rules
        self._lengths: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def wanted(self, request: Request, running: int) -> int:
        """Tokens to draft for a request while so many sequences run."""
        most = next((rule.k for rule in self._rules if rule.lo <= running <= rule.hi), self._max_tokens)
        return min(most, self._lengths.get(request, self._max_tokens))

    def observe(self, request: Request, output: RequestOutput) -> None:
        """Take note of what a verified draft came to."""
        if not (self._adaptive and output.drafted):
            return
        length = self._lengths.get(request, self._max_tokens)
        if output.accepted == output.drafted:
            length += 1
        elif 2 * output.accepted < output.drafted:
            length -= 1
        self._lengths[request] = max(1, min(self._max_tokens, length))
