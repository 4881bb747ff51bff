"""Grammars are compiled beside the engine's loop; requests wait until theirs is ready, and others go on."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher

from server.engine.grammar_vocabulary import GrammarVocabulary
from server.engine.sampling.grammar import GrammarError, GrammarState, empty_mask
from server.grammar.source import parser_limits, source_text
from server.messages import EngineRequest, Grammar

logger = logging.getLogger(__name__)

_KEPT = 16
"""Compiled grammars that are kept for the next request."""


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar over the model's vocabulary."""

    matcher: LLMatcher
    """At the beginning; for copying."""
    vocabulary: GrammarVocabulary

    def start(self, stop_token_ids: Iterable[int]) -> GrammarState:
        """A request's own state; those of its stop ids that are no text end the answer where the grammar allows."""
        ends = self.vocabulary.marks.intersection(stop_token_ids)
        return GrammarState(self.matcher, self.vocabulary.vocab_size, ends)


class GrammarCompiler:
    """Compiles in one thread, each text once, and keeps the requests that wait for it."""

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary]) -> None:
        """Prepare; nothing is loaded before the first grammar.

        Args:
            vocabulary: makes the model's, called once, in the thread.
        """
        self._make_vocabulary = vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._waiting: dict[int, tuple[EngineRequest, Future[CompiledGrammar]]] = {}

    @property
    def waiting(self) -> int:
        """Requests whose grammar is not ready."""
        return len(self._waiting)

    def add(self, request: EngineRequest, grammar: Grammar) -> None:
        """Compile the request's grammar, unless it is known or under way."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        self._waiting[request.request_id] = request, future
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Forget requests; unknown ids have left already."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def take_ready(self) -> Iterator[tuple[EngineRequest, CompiledGrammar | GrammarError]]:
        """Requests that need wait no longer, in the order in which they came, with what became of their grammar."""
        ready = [request_id for request_id, (_, future) in self._waiting.items() if future.done()]
        for request_id in ready:
            request, future = self._waiting.pop(request_id)
            error = future.exception()
            if error is None:
                yield request, future.result()
            elif isinstance(error, GrammarError):
                yield request, error
            else:
                logger.error("compiling a grammar failed", exc_info=error)
                yield request, GrammarError("The engine failed to compile the grammar; its log says why.")

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        return compile_grammar(grammar, self._vocabulary)


def compile_grammar(grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """Compile, and make the first mask: what is learnt of it is copied with the matcher.

    Raises:
        GrammarError: it cannot be compiled, or is too complex.
    """
    matcher = LLMatcher(vocabulary.tokenizer, source_text(grammar), log_level=0, limits=parser_limits())
    words = empty_mask(vocabulary.vocab_size)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    if matcher.is_error():
        raise GrammarError(f"The grammar cannot be compiled: {matcher.get_error().splitlines()[0][:200]}")
    return CompiledGrammar(matcher, vocabulary)
