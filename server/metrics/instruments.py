"""What counts: plain numbers of one process, written and read on one event loop."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import ClassVar, Generic, Protocol, TypeVar

from server.metrics.names import Metric


class Instrument(Protocol):
    """The numbers behind one set of label values."""

    @property
    def buckets(self) -> Sequence[float]:
        """Upper bounds of a histogram."""

    def values(self) -> Sequence[float]:
        """In the order of the series that the family shows for it."""


class Number:
    """A counter or a gauge."""

    __slots__ = ("_value",)
    buckets: ClassVar[Sequence[float]] = ()

    def __init__(self) -> None:
        self._value = 0.0

    def add(self, amount: float) -> None:
        """Count on; a counter takes no negative amount."""
        self._value += amount

    def set(self, value: float) -> None:
        """Show `value` from now on."""
        self._value = value

    def values(self) -> Sequence[float]:
        """The one number."""
        return (self._value,)


class Distribution:
    """A histogram with upper bounds `buckets`, ascending; one more bucket takes what is above them."""

    __slots__ = ("_counts", "_sum", "buckets")

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def set(self, counts: Sequence[int], total: float) -> None:
        """Show samples that are counted elsewhere: how many lie in each bucket, none above the last, and their sum."""
        self._counts = [*counts, 0]
        self._sum = total

    def observe(self, value: float, times: int = 1) -> None:
        """Take in `times` samples of `value`. A bucket holds values up to and including its bound."""
        self._counts[bisect_left(self.buckets, value)] += times
        self._sum += value * times

    def values(self) -> Sequence[float]:
        """The cumulative counts, then the count of all samples, then their sum."""
        counts = list(accumulate(self._counts))
        return (*counts, counts[-1], self._sum)


T_co = TypeVar("T_co", bound=Instrument, covariant=True)


class Family(Generic[T_co]):
    """The instruments of one metric, by label values. Those known from the start exist from the start."""

    def __init__(self, metric: Metric, make: Callable[[], T_co]) -> None:
        self.metric = metric
        self._children: dict[tuple[str, ...], T_co] = {}
        self._make = make
        for values in metric.values:
            self.of(*values)

    def items(self) -> Iterable[tuple[tuple[str, ...], T_co]]:
        """Each set of label values with its instrument."""
        return self._children.items()

    def of(self, *values: str) -> T_co:
        """The instrument of these label values, which must come from a bounded set."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self.metric.labels):
                raise ValueError(f"{self.metric.name} has the labels {self.metric.labels}, not {values}")
            child = self._children[values] = self._make()
        return child

    def replace(self, make: Callable[[], T_co]) -> None:
        """Begin anew with other instruments, for the label values that exist."""
        self._make = make
        self._children = {values: make() for values in self._children}


def numbers(metric: Metric) -> Family[Number]:
    """The family of a counter or gauge."""
    return Family(metric, Number)


def distributions(metric: Metric) -> Family[Distribution]:
    """The family of a histogram."""
    return Family(metric, lambda: Distribution(metric.buckets))
