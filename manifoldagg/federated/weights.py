"""Weights of clients: the share of each client in the training data."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from immutables import Map
from torch import Tensor

from manifoldagg._validation import check_choice, check_count, other_type_hint, short_repr
from manifoldagg.errors import ArgumentError

__all__ = ["Weights", "check_client"]

KINDS = ("observed", "uniform")
EARLY_REPORTS = 64
"""The number of clients up to which the first report of each client caps all earlier reports again."""
MAX_SAMPLES = 2**53
"""The largest sample count, because a float represents all integers up to 2**53 exactly."""
MIN_REPORTS = 5
"""The smallest number of other reports for which the cap uses the median instead of the lower median."""


@dataclass(frozen=True)
class Weights:
    r"""Weights $w_i$ of the clients, with the sample counts from which they are computed.

    There are three kinds of weights. $|D_i|$ is the sample count of client i, and N is the number of participating
    clients. A client participates if it has a ticket or has returned an update.

    - `"given"`: $w_i = |D_i| / \sum_j |D_j|$ with fixed sample counts of all clients.
    - `"uniform"`: $w_i = 1 / N$.
    - `"observed"`: $w_i = |D_i| / (N \bar D)$ with the sample counts that the clients report with their updates. Here,
      $\bar D$ is the mean of the reported counts.

    Attributes:
        cap_factor: the largest sample count as a multiple of the median of the other clients' reports. `None` disables
            this cap.
        kind: the kind of the weights.
        sample_counts: the given sample counts, by client.
        reported: the latest sample count of each participating client. Before the first update of a client, the entry
            is the negative number of its tickets.
        total: the sum of the given sample counts for the kind `"given"`, and the sum of the reported sample counts for
            the other kinds.
        bit_length_histogram: the number of clients whose reported count has 0, 1, 2 and more binary digits.

    Example:
        >>> weights = Weights.of({"ward-7": 30, "ward-8": 10}, None)
        >>> weights.weight("ward-7", samples=99)
        0.75
    """

    cap_factor: float | None
    kind: str
    sample_counts: Map[Hashable, int] = Map()
    reported: Map[Hashable, int] = Map()
    total: int = 0
    bit_length_histogram: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, spec: str | Mapping[Any, int], cap_factor: float | None) -> "Weights":
        """Return the initial weights of a server.

        Args:
            spec: a mapping from clients to sample counts, `"uniform"` or `"observed"`.
            cap_factor: the largest sample count as a multiple of the median of the other clients' reports. `None`
                disables this cap.

        Raises:
            ArgumentError: if `spec` has another form, or if a sample count is not a positive integer up to $2^{53}$.
        """
        cap_factor = None if cap_factor is None else float(cap_factor)
        if isinstance(spec, str):
            return cls(cap_factor, check_choice("weights", spec, KINDS))
        if not isinstance(spec, Mapping):
            raise ArgumentError(
                f"weights: expected {', '.join(KINDS)} or a mapping from clients to samples, got {short_repr(spec)}"
            )
        amounts = {
            check_client(client, "weights"): check_count(f"weights[{short_repr(client)}]", n)
            for client, n in spec.items()
        }
        if not amounts:
            raise ArgumentError("weights: expected at least one client, got an empty mapping")
        for client, amount in amounts.items():
            if amount > MAX_SAMPLES:
                raise ArgumentError(
                    f"weights[{short_repr(client)}]: expected at most 2^53 samples, got {short_repr(amount)}"
                )
        return cls(cap_factor, "given", Map(amounts), total=sum(amounts.values()))

    @property
    def num_clients(self) -> int:
        """The number N of clients. The mean weight is 1 / N."""
        return len(self.sample_counts if self.kind == "given" else self.reported)

    def check(self, client: Hashable) -> Hashable:
        """Return the name of a client if it is valid and the client has a weight.

        Raises:
            ArgumentError: if the name is invalid as in `check_client`, or if the weights are given and the client is
                not among them.
        """
        client = check_client(client)
        if self.kind == "given" and client not in self.sample_counts:
            hint = other_type_hint(client, self.sample_counts)
            raise ArgumentError(f"client: expected a client of weights, got {short_repr(client)}{hint}")
        return client

    def with_client(self, client: Hashable) -> "Weights":
        """Return the weights after a client has received a ticket, so that it participates."""
        before = self.reported.get(client, 0)
        if before > 0:
            return self
        histogram = self.bit_length_histogram if before else _update_histogram(self.bit_length_histogram, 0)
        return replace(self, reported=self.reported.set(client, before - 1), bit_length_histogram=histogram)

    def without_ticket(self, client: Hashable) -> "Weights":
        """Return the weights of the clients after a task of one client has ended without an update.

        If the client has no other task and has never returned an update, it stops participating. This can change the
        weights of the others, which depend on the number of participating clients.
        """
        before = self.reported.get(client, 0)
        if before >= 0:
            return self
        if before < -1:
            return replace(self, reported=self.reported.set(client, before + 1))
        silent, *others = self.bit_length_histogram
        return replace(self, reported=self.reported.delete(client), bit_length_histogram=(silent - 1, *others))

    def capped(self, client: Hashable, samples: int) -> int:
        """Return the sample count of a client, limited to `cap_factor` times the median of the other clients' reports.

        - There is no cap if `cap_factor` is `None`, if no other client has reported, or if the kind is not
          `"observed"`.
        - With fewer than five other reports, the cap uses the lower median. Otherwise, a single client could raise the
          cap.
        - `with_report` caps early reports again when more clients have reported. It does so at the first report of each
          of the first 64 clients, and later when the number of reporting clients reaches a power of two.

        Cost: one read of `bit_length_histogram`. If the count may exceed the cap, the method also needs one pass over
        all clients. Only counts above `cap_factor` / 2 times the median may exceed the cap.
        """
        factor = self.cap_factor
        if self.kind != "observed" or factor is None:
            return samples
        before = max(self.reported.get(client, 0), 0)
        known = len(self.reported) - self.bit_length_histogram[0] - (before > 0)
        if known == 0:
            return samples
        # The median is at least the lower of the two middle values. The histogram contains the number of binary digits
        # of this value. A value with d digits is at least 2 ** (d - 1).
        digits = _bit_length_at(self.bit_length_histogram, (known - 1) // 2, before.bit_length())
        if samples <= factor * 2 ** (digits - 1):
            return samples
        told = self.reported.delete(client) if client in self.reported else self.reported
        amounts = sorted(amount for amount in told.values() if amount > 0)
        upper = known // 2 if known >= MIN_REPORTS else (known - 1) // 2
        twice = amounts[(known - 1) // 2] + amounts[upper]
        above, below = factor.as_integer_ratio()
        return min(samples, above * twice // (2 * below))

    def weight(self, client: Hashable, samples: int) -> float:
        """Return the weight $w_i$ of a client that reports the capped sample count `samples`."""
        if self.kind == "given":
            return self.sample_counts[client] / self.total
        before = max(self.reported.get(client, 0), 0)
        after = self.with_report(client, samples) if before == 0 else self
        everybody = len(after.reported)
        if self.kind == "uniform":
            return 1 / everybody
        seen = everybody - after.bit_length_histogram[0]
        total = after.total if before == 0 else self.total - before + samples
        return samples * seen / (everybody * total)

    def share(self, client: Hashable, samples: int) -> float:
        """Return the weight of a client before normalisation.

        This is the sample count of the client, or 1 if all clients have the same weight.
        """
        if self.kind == "given":
            return float(self.sample_counts[client])
        return float(samples) if self.kind == "observed" else 1.0

    def with_report(self, client: Hashable, samples: int) -> "Weights":
        """Return the weights of all clients after one client has reported its sample count.

        The argument `samples` is the reported count after the method `capped` has limited it.
        """
        found = self.reported.get(client)
        if found == samples:
            return self
        before = max(found or 0, 0)
        histogram = self.bit_length_histogram
        digits = samples.bit_length()
        away = None if found is None else before.bit_length()
        if digits != away:
            histogram = _update_histogram(histogram, digits, away)
        total = self.total if self.kind == "given" else self.total - before + samples
        reported = self.reported.set(client, samples)
        after = Weights(self.cap_factor, self.kind, self.sample_counts, reported, total, histogram)
        is_first = not before and self.kind == "observed"
        if is_first and _is_recap_due(len(reported) - histogram[0]) and after._may_exceed_a_cap:
            # An early, uncapped count would otherwise distort all weights until its client reports again.
            known = after
            for name, amount in known.reported.items():
                after = after.with_report(name, known.capped(name, amount)) if amount > 0 else after
        return after

    @property
    def _may_exceed_a_cap(self) -> bool:
        """Whether a report may exceed its cap, as far as the bit lengths of the reports can tell."""
        if self.cap_factor is None:
            return False
        histogram = self.bit_length_histogram
        shortest = next((digits for digits in range(1, len(histogram)) if histogram[digits]), 1)
        # Every median is at least 2 ** (shortest - 1), and every report is less than 2 ** (len(histogram) - 1).
        return 1 << (len(histogram) - 1) > self.cap_factor * (1 << (shortest - 1))

    def state(self) -> dict[str, Any]:
        """Return the state as plain values for `of_state`."""
        return {"kind": self.kind, "sample_counts": dict(self.sample_counts), "reported": dict(self.reported)}

    @classmethod
    def of_state(
        cls, state: Mapping[str, Any], spec: str | Mapping[Any, int] | None, cap_factor: float | None
    ) -> "Weights":
        """Restore weights from the result of `state`.

        Args:
            state: the result of `state`.
            spec: new weights, as in `of`, which replace the saved ones. `None` means the saved weights. In both cases,
                the saved reports of the clients are restored.
            cap_factor: the cap factor as in `of`, because `state` does not contain it.

        Raises:
            ArgumentError: if `state` is invalid, or if `spec` is a mapping without a participating client.
        """
        if not isinstance(state, Mapping) or set(state) != {"kind", "sample_counts", "reported"}:
            raise ArgumentError("weights: state: expected the result of Weights.state()")
        if spec is None:
            spec = state["sample_counts"] if state["kind"] == "given" else state["kind"]
        weights = cls.of(spec, cap_factor)
        told = {}
        for client, samples in state["reported"].items():
            told[weights.check(client)] = check_count(
                f"weights: reported[{short_repr(client)}]", samples, at_least=-MAX_SAMPLES
            )
        counts = [max(samples, 0) for samples in told.values()]
        lengths = Counter(map(int.bit_length, counts))
        return replace(
            weights,
            reported=Map(told),
            total=weights.total if weights.kind == "given" else sum(counts),
            bit_length_histogram=tuple(lengths[digits] for digits in range(max(lengths, default=0) + 1)),
        )


def check_client(client: Hashable, name: str = "client") -> Hashable:
    """Check the name of a client, and return it.

    A name must be hashable and must compare by value. A tensor is therefore not a valid name. The function converts
    NumPy scalars to Python values.

    Args:
        client: the name of the client.
        name: the argument that contains the name, for error messages.

    Raises:
        ArgumentError: if the name is not hashable, does not equal itself, or contains a tensor.
    """
    if type(client) is str:
        return client
    if any(isinstance(part, Tensor) for part in _components(client)):
        raise ArgumentError(f"{name}: expected a hashable name, got a tensor, which does not compare by content")
    try:
        hash(client)
        found = all(part == part for part in _components(client))
        # A comparison of a NumPy scalar with another client's name would return an array if that name is a tuple.
        plain = client.item() if isinstance(client, np.generic) else client
        if plain is not client and plain == client and hash(plain) == hash(client):
            client = plain
    except Exception:  # The methods `__hash__` and `__eq__` of the name may raise any exception.
        raise ArgumentError(f"{name}: expected a hashable name, got one of type {type(client).__name__}") from None
    if not found:
        raise ArgumentError(f"{name}: expected a name that equals itself, got {short_repr(client)}")
    return client


def _components(name: Any) -> Iterator[Any]:
    """Yield a name and, if it is a tuple or a frozen set, recursively its components."""
    yield name
    if isinstance(name, tuple | frozenset):
        for part in name:
            yield from _components(part)


def _is_recap_due(num_reports: int) -> bool:
    """Return whether earlier reports are capped again after this number of clients has reported."""
    return num_reports <= EARLY_REPORTS or num_reports & (num_reports - 1) == 0


def _update_histogram(histogram: tuple[int, ...], bit_length: int, removed: int | None = None) -> tuple[int, ...]:
    """Add a sample count of `bit_length` bits to a histogram, in place of one of `removed` bits."""
    longer = [*histogram, *[0] * (bit_length + 1 - len(histogram))]
    longer[bit_length] += 1
    if removed is not None:
        longer[removed] -= 1
    while not longer[-1] and len(longer) > 1:
        longer.pop()
    return tuple(longer)


def _bit_length_at(histogram: tuple[int, ...], rank: int, excluded: int) -> int:
    """Return the number of bits of the sample count whose rank is `rank`, counted from 0 in ascending order.

    The entry `histogram[b]` is the number of clients whose sample counts have b bits. The ranking excludes clients
    without samples, and one client whose sample count has `excluded` bits.
    """
    for digits in range(1, len(histogram)):
        rank -= histogram[digits] - (digits == excluded)
        if rank < 0:
            return digits
    raise AssertionError("rank: expected a rank below the number of non-zero counts")
