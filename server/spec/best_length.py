"""The draft length that makes the most tokens a second, found by trying: what a draft is worth depends on the machine.

A step with drafts costs more than one without: the target checks more tokens, and the draft runs. How much more depends
on how many sequences run, how much of it is accepted, and the hardware; so all three are measured together, as tokens
and seconds of whole cycles (drafting, then the step that checks it).
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MEMORY = 0.96
"""What a cycle's figures keep of their weight when the next one of the same length comes: the last 25 or so count."""
_TRIAL = 4
"""Cycles that another length is tried for."""
_FIRST_PAUSE, _LONGEST_PAUSE = 12, 768
"""Cycles between trials, once each length has been tried; a trial that changes nothing doubles the pause, one that does
begins anew."""
_TRIAL_SHARE = 0.01
"""Of the time: the most that trials may lose, which makes the pause after a costly one longer."""
_BETTER = 1.03
"""How much more a length must make before it is taken."""
_OUTLIER = 3.0
"""A cycle that took so many times the usual counts as that long: the machine was busy with something else."""


@dataclass
class _Figures:
    """Of one length, with older cycles faded."""

    tokens: float = 0.0
    seconds: float = 0.0
    cycles: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        if self.cycles >= 1:
            seconds = min(seconds, _OUTLIER * self.seconds / self.cycles)
        self.tokens = _MEMORY * self.tokens + tokens
        self.seconds = _MEMORY * self.seconds + seconds
        self.cycles = _MEMORY * self.cycles + 1

    @property
    def rate(self) -> float:
        """Tokens a second; 0 before the first cycle."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class _Load:
    """What is known of one range of running sequences."""

    best: int
    figures: list[_Figures]
    trying: int | None = None
    cycles: int = 0
    """Since the current length began."""
    tokens: float = 0.0
    """Of all these cycles."""
    seconds: float = 0.0
    pause: int = _TRIAL
    turns: list[int] = field(default_factory=list)
    """Lengths still to try before all have had their turn."""

    def begin(self, trying: int | None) -> None:
        """Go over to another length to see what it is worth, or back to the best."""
        self.trying, self.cycles, self.tokens, self.seconds = trying, 0, 0.0, 0.0
        if trying is not None:
            # What it was worth long ago says little.
            self.figures[trying] = _Figures()

    @property
    def length(self) -> int:
        """The current length."""
        return self.best if self.trying is None else self.trying


class BestLength:
    """Chooses 0 to k drafts for all sequences of a step, by the number that run: 1, 2 to 3, 4 to 7, and so on."""

    def __init__(self, max_tokens: int) -> None:
        """Begin with long drafts; a new load begins with what was best at the next smaller one.

        Args:
            max_tokens: k.
        """
        self._max_tokens = max_tokens
        self._loads: dict[int, _Load] = {}

    def choose(self, running: int) -> int:
        """The length while so many sequences run."""
        return self._load(running).length

    def learn(self, running: int, length: int, tokens: float, seconds: float) -> None:
        """Take in one cycle.

        Args:
            running: sequences of it.
            length: what `choose` said for it.
            tokens: that it was worth, over all sequences.
            seconds: it took.
        """
        load = self._load(running)
        if length != load.length:
            return
        load.cycles, load.tokens, load.seconds = load.cycles + 1, load.tokens + tokens, load.seconds + seconds
        # The first one pays for the change: a draft that rested catches up, and its sequences carry shorter drafts.
        if load.cycles > 1:
            load.figures[length].add(tokens, seconds)
        if load.trying is None and load.cycles > load.pause:
            load.begin(self._next(load))
        elif load.trying is not None and load.cycles > _TRIAL:
            self._judge(load)

    def _next(self, load: _Load) -> int:
        """The length whose turn it is: those first that nothing is known of; no drafts, then from long to short."""
        if not load.turns:
            lengths = [length for length in (0, *range(self._max_tokens, 0, -1)) if length != load.best]
            load.turns = sorted(lengths, key=lambda length: load.figures[length].cycles > 0)
        return load.turns.pop(0)

    def _judge(self, load: _Load) -> None:
        tried, best, again = load.length, load.figures[load.best], 2 * load.pause
        if best.rate:
            lost = load.seconds - load.tokens / best.rate
            again = max(again, int(lost / (_TRIAL_SHARE * best.seconds / best.cycles)))
        load.begin(None)
        if load.figures[tried].rate > _BETTER * load.figures[load.best].rate:
            load.best, load.turns, again = tried, [], _FIRST_PAUSE
        else:
            again = min(max(again, _FIRST_PAUSE), _LONGEST_PAUSE)
        load.pause = again if all(figures.cycles for figures in load.figures) else _TRIAL

    def _load(self, running: int) -> _Load:
        size = running.bit_length()
        if size not in self._loads:
            smaller = [self._loads[other].best for other in sorted(self._loads) if other < size]
            best = smaller[-1] if smaller else self._max_tokens
            self._loads[size] = _Load(best, [_Figures() for _ in range(self._max_tokens + 1)])
        return self._loads[size]
