"""Weights of clients: the share of each client in the training data."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        counts: the sample counts of the clients that have returned an update, in ascending order.

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
    counts: Sequence[int] = field(default_factory=lambda: array("q"))

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
            check_client(client, "weights"): _check_samples(f"weights[{short_repr(client)}]", n)
            for client, n in spec.items()
        }
        if not amounts:
            raise ArgumentError("weights: expected at least one client, got an empty mapping")
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
        return self if before > 0 else replace(self, reported=self.reported.set(client, before - 1))

    def without_ticket(self, client: Hashable) -> "Weights":
        """Return the weights of the clients after a task of one client has ended without an update.

        If the client has no other task and has never returned an update, it stops participating. This can change the
        weights of the others, which depend on the number of participating clients.
        """
        before = self.reported.get(client, 0)
        if before >= 0:
            return self
        reported = self.reported.delete(client) if before == -1 else self.reported.set(client, before + 1)
        return replace(self, reported=reported)

    def capped(self, client: Hashable, samples: int) -> int:
        """Return the sample count of a client, limited to `cap_factor` times the median of the other clients' reports.

        - There is no cap if `cap_factor` is `None`, if no other client has reported, or if the kind is not
          `"observed"`.
        - With fewer than five other reports, the cap uses the lower median. Otherwise, a single client could raise the
          cap.
        - `with_report` caps early reports again when more clients have reported. It does so at the first report of each
          of the first 64 clients, and later when the number of reporting clients reaches a power of two.
        """
        factor = self.cap_factor
        if self.kind != "observed" or factor is None:
            return samples
        counts = self.counts
        before = max(self.reported.get(client, 0), 0)
        known = len(counts) - (before > 0)
        if known == 0:
            return samples
        own = bisect_left(counts, before) if before else len(counts)
        lower = (known - 1) // 2
        upper = known // 2 if known >= MIN_REPORTS else lower
        # The ranks of the other clients' counts skip the position of the client's own count.
        twice = counts[lower + (lower >= own)] + counts[upper + (upper >= own)]
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
        total = after.total if before == 0 else self.total - before + samples
        return samples * len(after.counts) / (everybody * total)

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
        counts = array("q", self.counts)  # Copying an array takes less time than copying a tuple of integers.
        if before:
            del counts[bisect_left(counts, before)]
        insort(counts, samples)
        total = self.total if self.kind == "given" else self.total - before + samples
        after = replace(self, reported=self.reported.set(client, samples), total=total, counts=counts)
        if before or self.kind != "observed" or self.cap_factor is None or not _is_recap_due(len(counts)):
            return after
        above, below = self.cap_factor.as_integer_ratio()
        if counts[-1] * below > above * counts[0]:  # Otherwise, no count can exceed its cap.
            # An early, uncapped count would otherwise distort all weights until its client reports again.
            known = after
            for name, amount in known.reported.items():
                after = after.with_report(name, known.capped(name, amount)) if amount > 0 else after
        return after

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
            label = f"weights: reported[{short_repr(client)}]"
            told[weights.check(client)] = _check_samples(label, samples, at_least=-MAX_SAMPLES)
        counts = array("q", sorted(samples for samples in told.values() if samples > 0))
        total = weights.total if weights.kind == "given" else sum(counts)
        return replace(weights, reported=Map(told), total=total, counts=counts)


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


def _check_samples(name: str, value: int, at_least: int = 1) -> int:
    number = check_count(name, value, at_least=at_least)
    if number > MAX_SAMPLES:
        raise ArgumentError(f"{name}: expected at most 2^53 samples, got {short_repr(value)}")
    return number
