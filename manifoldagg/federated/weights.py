"""Weights: each client's share of the data, as a server states it."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from immutables import Map
from torch import Tensor

from manifoldagg._validation import check_choice, check_count
from manifoldagg.errors import ArgumentError

__all__ = ["Weights", "check_client"]

KINDS = ("observed", "uniform")
MOST = 2**53
"""The largest amount: up to here floats count exactly."""
OTHERS = 5
"""From so many others on their median says what a client may claim."""


@dataclass(frozen=True)
class Weights:
    r"""Who takes part, how many samples they have told, and the $w_i$ that follow: a value.

    Attributes:
        factor: of a claim counts at most so many medians of what others have told; `None` for all of it.
        kind: `"given"`, $w_i = |D_i| / \sum_j |D_j|$; `"uniform"`, 1 / N; or `"observed"`,
            $|D_i| / (N \cdot$ mean of the $|D|$ seen$)$, with N the clients that were ever dispatched to.
        amounts: the samples that were given up front, by client.
        told: every client's latest word on its samples; 0 until it has answered.
        total: the sum of what $w_i$ divides by: of `amounts` where they were given, of `told` else.
        lengths: how many clients have told an amount of 0, 1, 2 ... binary digits.

    Example:
        >>> weights = Weights.of({"ward-7": 30, "ward-8": 10}, None)
        >>> weights.weight("ward-7", samples=99)
        0.75
    """

    factor: float | None
    kind: str
    amounts: Map[Hashable, int] = Map()
    told: Map[Hashable, int] = Map()
    total: int = 0
    lengths: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, given: str | Mapping[Any, int], factor: float | None) -> "Weights":
        r"""What a server starts with.

        Args:
            given: a mapping client to samples; `"uniform"` or `"observed"`.
            factor: as above.

        Raises:
            ArgumentError: naming a client whose samples are no positive integer up to $2^{53}$.
        """
        factor = None if factor is None else float(factor)
        if not isinstance(given, Mapping):
            return cls(factor, check_choice("weights", given, KINDS))
        amounts = {check_client(client): check_count(f"weights[{client!r}]", n) for client, n in given.items()}
        if not amounts:
            raise ArgumentError("weights: expected at least one client, got an empty mapping")
        for client, amount in amounts.items():
            if amount > MOST:
                raise ArgumentError(f"weights[{client!r}]: expected at most 2^53 samples")
        return cls(factor, "given", Map(amounts), total=sum(amounts.values()))

    def check(self, client: Hashable) -> None:
        """A client has a name that can be found again and, where weights were given up front, one of these.

        Raises:
            ArgumentError: if not.
        """
        check_client(client)
        if self.kind == "given" and client not in self.amounts:
            raise ArgumentError(f"client: {client!r} has no entry in the weights that were given")

    def registered(self, client: Hashable) -> "Weights":
        """With `client`, which was dispatched to, taking part."""
        if client in self.told:
            return self
        return replace(self, told=self.told.set(client, 0), lengths=_counted(self.lengths, 0))

    def believed(self, client: Hashable, samples: int) -> int:
        """How much of a claim of `samples` counts: at most `factor` times the median of what others have told.

        The claim itself where fewer than five others have told anything, where there is no `factor`, and where the
        weights are not those of the samples. What was told before there were six is looked at again with the sixth.

        Cost: a look at `lengths`; over all clients once where they do not tell, which takes a claim above
        `factor` / 2 medians.
        """
        factor = self.factor
        if self.kind != "observed" or factor is None:
            return samples
        before = self.told.get(client, 0)
        known = len(self.told) - self.lengths[0] - (before > 0)
        if known < OTHERS:
            return samples
        # The median is no smaller than the lower of its two, which has so many digits.
        digits = _digits(self.lengths, (known - 1) // 2, before.bit_length())
        if samples <= factor * 2 ** (digits - 1):
            return samples
        told = self.told.delete(client) if client in self.told else self.told
        amounts = sorted(filter(None, told.values()))
        twice = amounts[(known - 1) // 2] + amounts[known // 2]
        above, below = factor.as_integer_ratio()
        return min(samples, above * twice // (2 * below))

    def weight(self, client: Hashable, samples: int) -> float:
        """$w_i$, now that `client` tells `samples`."""
        if self.kind == "given":
            return self.amounts[client] / self.total
        everybody = len(self.told)
        if self.kind == "uniform":
            return 1 / everybody
        before = self.told.get(client, 0)
        seen = everybody - self.lengths[0] + (before == 0)
        return samples * seen / (everybody * (self.total - before + samples))

    def share(self, client: Hashable, samples: int) -> float:
        """What $w_i$ is a multiple of: the samples, as given or as told; 1 where all are alike."""
        if self.kind == "given":
            return float(self.amounts[client])
        return float(samples) if self.kind == "observed" else 1.0

    def recorded(self, client: Hashable, samples: int) -> "Weights":
        """With a client's latest word on its samples, as far as it is believed."""
        after = self._put(client, samples)
        first = not self.told.get(client)
        if first and self.kind == "observed" and len(after.told) - after.lengths[0] == OTHERS + 1:
            # An early claim would weigh on everybody for as long as its client tells nothing else.
            known = after
            for name, amount in known.told.items():
                after = after._put(name, known.believed(name, amount)) if amount else after
        return after

    def _put(self, client: Hashable, samples: int) -> "Weights":
        """With what a client has told."""
        before = self.told.get(client)
        if before == samples:
            return self
        told = self.told.set(client, samples)
        total = self.total if self.kind == "given" else self.total - (before or 0) + samples
        away = None if before is None else before.bit_length()
        lengths = _counted(self.lengths, samples.bit_length(), away)
        return Weights(self.factor, self.kind, self.amounts, told, total, lengths)

    def state(self) -> dict[str, Any]:
        """A tree from which `of_state` makes an equal value."""
        return {"kind": self.kind, "amounts": dict(self.amounts), "told": dict(self.told)}

    @classmethod
    def of_state(
        cls, state: Mapping[str, Any], given: str | Mapping[Any, int] | None, factor: float | None
    ) -> "Weights":
        """What `state` was returned by.

        Args:
            state: from `state`.
            given: as in `of`, in place of what the state says of it; what was told stays. `None` for what it says.
            factor: as above; it is no part of the state.

        Raises:
            ArgumentError: if it is no such tree, or a client that takes part is missing in what is given.
        """
        if not isinstance(state, Mapping) or set(state) != {"kind", "amounts", "told"}:
            raise ArgumentError("weights: state: expected what Weights.state() returned")
        if given is None:
            given = state["amounts"] if state["kind"] == "given" else state["kind"]
        weights = cls.of(given, factor)
        told = {}
        for client, samples in state["told"].items():
            weights.check(client)
            told[client] = check_count(f"weights: told[{client!r}]", samples, at_least=0)
        lengths = Counter(map(int.bit_length, told.values()))
        return replace(
            weights,
            told=Map(told),
            total=weights.total if weights.kind == "given" else sum(told.values()),
            lengths=tuple(lengths[digits] for digits in range(max(lengths, default=0) + 1)),
        )


def check_client(client: Hashable, name: str = "client") -> Hashable:
    """A name, such as of a client: what can be hashed and, with the same content, is the same key again.

    Raises:
        ArgumentError: if it cannot be hashed, if it does not equal itself, or if there is a tensor in it.
    """
    if type(client) is str:
        return client
    if any(isinstance(part, Tensor) for part in _parts(client)):
        raise ArgumentError(
            f"{name}: expected a hashable name, got a tensor, which equals no other of the same content"
        )
    try:
        hash(client)
        found = all(part == part for part in _parts(client))
    except Exception:  # whatever the name's own code raises
        raise ArgumentError(f"{name}: expected a hashable name, got one of type {type(client).__name__}") from None
    if not found:
        raise ArgumentError(f"{name}: expected a name that equals itself, got {client!r}")
    return client


def _parts(name: Any) -> Iterator[Any]:
    """A name and, of a tuple or a set, what is in it."""
    yield name
    if isinstance(name, tuple | frozenset):
        for part in name:
            yield from _parts(part)


def _counted(lengths: tuple[int, ...], digits: int, away: int | None = None) -> tuple[int, ...]:
    """With one more amount of so many digits, and one less of `away`."""
    if digits == away:
        return lengths
    longer = [*lengths, *[0] * (digits + 1 - len(lengths))]
    longer[digits] += 1
    if away is not None:
        longer[away] -= 1
    while not longer[-1] and len(longer) > 1:
        longer.pop()
    return tuple(longer)


def _digits(lengths: tuple[int, ...], place: int, without: int) -> int:
    """How many digits the amount has that is at `place` among those that are not 0 but one of `without` digits."""
    for digits in range(1, len(lengths)):
        place -= lengths[digits] - (digits == without)
        if place < 0:
            return digits
    raise AssertionError("fewer amounts than places")
