"""The method that a run executes, and the result of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_instance
from manifoldagg.federated import Rule, Trainer
from manifoldagg.federated.server.validation import check_rule
from manifoldagg.federated.stability import with_buffer_size
from manifoldagg.federated.types import check_trainer
from manifoldagg.simulation.cost import Evaluation, StartEvaluation, first_reaching
from manifoldagg.simulation.evaluation import gini, theil
from manifoldagg.simulation.trace import TaskRecord

__all__ = ["Method", "RunResult", "check_method"]


@dataclass(frozen=True)
class Method:
    """A method of federated learning: the rule of the server and the trainer of the clients.

    Attributes:
        name: the display name, which must be unique in a comparison.
        rule: the rule, or a function that receives the participating clients and returns a rule. Such a function is
            required if the rule depends on the clients, for example if it selects each client with its own probability.
        trainer: the trainer that every client runs.
        rate_field: the path of the field that contains the global learning rate of the rule, such as `"rate"` or
            `"rule.rate"`. Tuning changes this field. With `None`, the rate is not tuned.
    """

    name: str
    rule: Rule | Callable[[Sequence[int]], Rule]
    trainer: Trainer
    rate_field: str | None = "rate"

    def bind(self, clients: Sequence[int], buffer: int | None = None) -> "Method":
        """Build the rule for the given clients, and return a method with this rule.

        Args:
            clients: the participating clients.
            buffer: the number of updates in each step of a rule with a buffer. The default is the buffer size of the
                rule.

        Raises:
            ArgumentError: if the rule or the trainer is invalid, or if the rule has no buffer.
        """
        made: Any = self.rule
        if callable(made) and not hasattr(made, "step"):
            made = made(clients)
        check_trainer(self.trainer)
        check_rule(made)
        return replace(self, rule=made if buffer is None else with_buffer_size(made, buffer))


def check_method(name: str, method: object) -> Method:
    """Return `method`, or raise an `ArgumentError` if it is not a `Method`.

    Example:
        >>> check_method("method", "fedasync")
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: method: expected a Method, got 'fedasync'; write method('fedasync')
    """
    hint = f"method({method!r})" if isinstance(method, str) else "Method(name, rule, trainer)"
    return check_instance(name, method, Method, hint)


@dataclass(frozen=True)
class RunResult:
    """The result of a run: the evaluations of the server's model, and the trace of the clients' tasks.

    Attributes:
        evaluations: the evaluations in order. The first one precedes update 1, and the last one follows all updates.
        trace: the record of the task of each update, (updates,). It contains the staleness in versions of the server's
            model.
        client_accuracy: the accuracy of the best evaluated model, for each client with held-out samples on which the
            metric is defined.
        seconds: the wall-clock time of the run in seconds, without evaluations.
        evaluation_seconds: the wall-clock time of the evaluations in seconds.
        starts: the evaluations of the clients' start models in order of dispatch. The list is empty without
            `eval_starts`.
    """

    evaluations: list[Evaluation]
    trace: list[TaskRecord[int]]
    client_accuracy: list[float]
    seconds: float = field(compare=False)
    evaluation_seconds: float = field(compare=False)
    starts: list[StartEvaluation] = field(default_factory=list)

    def __repr__(self) -> str:
        return format_result(
            self,
            updates=len(self.trace),
            accuracy=self.evaluations[-1].accuracy if self.evaluations else None,
            evaluations=len(self.evaluations),
            seconds=self.seconds,
        )

    @property
    def accuracy(self) -> list[float]:
        """The accuracy of each evaluation."""
        return [row.accuracy for row in self.evaluations]

    @property
    def average_accuracy(self) -> list[float | None]:
        """The accuracy of the averaged model at each evaluation.

        The averaged model is the mean of several versions of the server's model. An entry is `None` if no version has
        been averaged yet, or if the BatchNorm statistics of the averaged model are not finite.
        """
        return [row.average_accuracy for row in self.evaluations]

    @property
    def evaluated_at(self) -> list[int]:
        """The number of updates at each evaluation."""
        return [row.updates for row in self.evaluations]

    @property
    def clients(self) -> list[int]:
        """The client of each update, (updates,)."""
        return [task.client for task in self.trace]

    @property
    def staleness(self) -> list[int]:
        """The staleness of each update in versions, (updates,)."""
        return [task.staleness for task in self.trace]

    @property
    def times(self) -> list[float]:
        """The virtual time of each update in seconds, (updates,)."""
        return [task.finished for task in self.trace]

    @property
    def rejected(self) -> int:
        """The number of updates that the server rejected or whose training diverged."""
        return self.evaluations[-1].rejected

    @property
    def gini(self) -> float:
        """The Gini index of the clients' accuracies."""
        return gini(self.client_accuracy)

    @property
    def theil(self) -> float:
        """The Theil index of the clients' accuracies."""
        return theil(self.client_accuracy)

    def updates_to(self, target: float) -> int | None:
        """Return the number of updates at the first evaluation with an accuracy of at least `target`.

        If no evaluation has this accuracy, return `None`.
        """
        row = first_reaching(self.evaluations, target)
        return None if row is None else row.updates
