"""Whether a grammar can be compiled: found out before the request reaches the engine, off the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from server.api.errors import invalid
from server.api.structured import AskedGrammar
from server.api.worker_process import WorkerPool
from server.grammar.worker import Question, Verdict
from server.messages import Grammar

_CPU_SECONDS = 0.4
_MEMORY_BYTES = 768 * 2**20
_AT_ONCE = 2
_REMEMBERED = 1024
MAX_REPETITIONS = 4096
_REPETITION = re.compile(r"\{\s*(\d+)?\s*(?:,\s*(\d+)?\s*)?\}")


class GrammarChecker:
    """Compiles what clients ask for in worker processes, to tell them what is wrong with it."""

    def __init__(self) -> None:
        self._pool = WorkerPool("server.grammar.worker", cpu_seconds=_CPU_SECONDS, memory_bytes=_MEMORY_BYTES)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="grammar")
        self._known: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, asked: AskedGrammar | None, special_tokens: Sequence[str]) -> Grammar | None:
        """The grammar itself. Raises `ApiError` 400 that names the field when it cannot be compiled.

        Args:
            asked: by the request, or None.
            special_tokens: of the model; a grammar may name them.
        """
        if asked is None:
            return None
        key = hashlib.blake2b(f"{asked.grammar.kind} {asked.grammar.text}".encode()).digest()
        problem = self._known.get(key)
        if problem is None:
            loop = asyncio.get_running_loop()
            problem = await loop.run_in_executor(self._threads, self._problem, asked.grammar, special_tokens)
            self._known[key] = problem
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        if problem:
            raise invalid(f"{asked.param}: {problem}.", param=asked.param)
        return asked.grammar

    def close(self) -> None:
        """End the threads and processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    def _problem(self, grammar: Grammar, special_tokens: Sequence[str]) -> str:
        most = max(map(_repetitions, _REPETITION.finditer(grammar.text)), default=0)
        if most > MAX_REPETITIONS:
            return f"something is repeated {most} times; at most {MAX_REPETITIONS} are allowed"
        answer = self._pool.ask(msgspec.json.encode(Question(grammar, list(special_tokens))))
        if answer is None:
            return "it is too complex: compiling it took too long or too much memory"
        return msgspec.json.decode(answer, type=Verdict).problem


def _repetitions(match: re.Match[str]) -> int:
    return max(int(number[:18]) for number in (*match.groups(), "0") if number)
