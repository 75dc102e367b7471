"""Ensembles: predictions averaged over models drawn from an embedding, and their scores."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_count, check_finite, check_shape, short_repr
from manifoldagg.curves import Embedding, refresh_buffers
from manifoldagg.curves.batchnorm import batch_norm_layers, evaluation_mode
from manifoldagg.curves.sampling import Sampling
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.manifolds.manifold import check_not_model

__all__ = ["Ensemble", "Score", "ensemble"]


@dataclass(frozen=True)
class Score:
    r"""The scores of predictions $p_j$ of n classes $y_j$.

    Attributes:
        samples: n.
        accuracy: the part whose most probable class (the first of equally probable ones) is $y_j$.
        nll: $-\frac1n \sum_j \log p_j(y_j)$, in nats.
    """

    samples: int
    accuracy: float
    nll: float

    def __repr__(self) -> str:
        return format_result(self, samples=self.samples, accuracy=self.accuracy, nll=self.nll)


@dataclass(frozen=True)
class Ensemble:
    r"""The scores on the same samples of the ensemble, of each drawn model, and of the single model.

    Attributes:
        combined: of the mean $\frac1n \sum_j p_{\iota_\varphi(x_j)}$ of class probabilities.
        members: of each drawn model.
        single: of the single model.
        coordinates: $x_j$ that were drawn: numbers, or tensors (*domain).
    """

    combined: Score
    members: tuple[Score, ...]
    single: Score
    coordinates: tuple[Any, ...]

    def __repr__(self) -> str:
        return format_result(self, combined=self.combined, single=self.single, draws=len(self.members))

    def __str__(self) -> str:
        rows = [("single", self.single), ("ensemble", self.combined)]
        lines = [f"{name:<10} {c.accuracy:>9.4f} {c.nll:>9.4f}" for name, c in rows]
        return "\n".join([f"{'':<10} {'accuracy':>9} {'NLL':>9}", *lines])


@torch.no_grad()
def ensemble(
    model: nn.Module,
    embedding: Embedding,
    phi: Float[Tensor, "size ..."],
    batches: Iterable[Any],
    *,
    single: Float[Tensor, " P"],
    generator: torch.Generator,
    draws: int = 10,
    refresh: Iterable[Any] | None = None,
    targets: str = "targets",
) -> Ensemble:
    r"""Average class probabilities over models drawn from a curve, a tunnel or a simplex: $\frac1n \sum_j
    \operatorname{softmax} f_{\iota_\varphi(x_j)}$, $x_j$ uniform.

    Batches are read once, each by all models in turn; besides places and buffers one model is in memory. `model` lends
    its code: its parameters, buffers and modes are what they were when this returns. It computes as in evaluation.

    Args:
        model: from inputs to logits (n, classes).
        embedding: on the `ParameterSpace` of its parameters.
        phi: what draws it.
        batches: each a pair (inputs, classes), or a mapping of the model's keyword arguments and, by the name
            `targets`, the classes.
        single: the model that the ensemble is compared with (P,).
        generator: draws the places.
        draws: $n$.
        refresh: batches for the statistics of BatchNorm, in the same form or inputs alone, read once for each model;
            needed where the model has such layers: those of training, not those that are judged.
        targets: the name of the classes in batches that are mappings.

    Returns:
        Accuracy and NLL of the ensemble, of its members and of the single model, and the places that were drawn.

    Raises:
        ArgumentError: naming the argument that does not fit.
        StateDictError: if `model` does not have the layout of the space.
        DivergenceError: if what a model says is not a number, naming the model.

    Source: Benton et al. 2021, section 5; Garipov et al. 2018.

    Example:
        >>> from manifoldagg.curves import Bezier
        >>> model = nn.Linear(2, 3)
        >>> space = ParameterSpace.of(model)
        >>> curve, single = Bezier(space), torch.zeros(9)
        >>> data = [(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))]
        >>> found = ensemble(
        ...     model, curve, curve.collapse(single), data, single=single, generator=torch.Generator()
        ... )
        >>> found.combined.accuracy, round(found.combined.nll, 4)
        (0.5, 1.0986)
    """
    if not isinstance(embedding, Embedding) or not isinstance(embedding.space, ParameterSpace):
        raise ArgumentError(f"embedding: expected one on a ParameterSpace, got {short_repr(embedding)}")
    space = embedding.space
    for name, read in (("batches", batches), ("refresh", () if refresh is None else refresh)):
        if not isinstance(read, Iterable):
            raise ArgumentError(f"{name}: expected an iterable of batches, got {type(read).__name__}")
    if not isinstance(generator, torch.Generator):
        raise ArgumentError(f"generator: expected a torch.Generator, got {short_repr(generator)}")
    embedding._check_phi(phi)
    check_finite("phi", phi)
    check_not_model("single", single)
    check_finite("single", check_shape("single", single, *space.shape))
    check_count("draws", draws)
    space.buffers(model)
    norms = bool(batch_norm_layers(model))
    if norms and refresh is None:
        raise ArgumentError(
            "refresh: the model has BatchNorm, whose statistics need batches of training data; got None"
        )
    if norms and isinstance(refresh, Iterator):
        raise ArgumentError("refresh: expected batches that can be read once for each model, got an iterator")

    drawn = tuple(x for _, x in Sampling(samples=draws).coordinates(embedding, phi, generator))

    def point(i: int) -> Tensor:
        return single if i == draws else embedding(phi, drawn[i])

    def statistics(i: int) -> dict[str, Tensor]:
        fresh = {}
        if norms and refresh is not None:
            inputs = (_inputs_and_targets(batch, targets)[0] for batch in refresh)
            # What takes a tuple gets all of it: refresh_buffers would take its first.
            wrapped = ((x,) if isinstance(x, tuple | list) else x for x in inputs)
            try:
                fresh = refresh_buffers(space, model, point(i), wrapped)
            except ValueError as error:
                raise ArgumentError(f"refresh: {error}") from error
        return {name: fresh.get(name, buffer).detach().clone() for name, buffer in model.named_buffers()}

    buffers = [statistics(i) for i in range(draws + 1)]
    together = _ScoreAccumulator()
    tallies = [_ScoreAccumulator() for _ in buffers]
    with evaluation_mode(model):
        for batch in batches:
            inputs, classes = _inputs_and_targets(batch, targets)
            if classes is None:
                raise ArgumentError(
                    f"batches: expected pairs, or mappings with {targets!r}; got {type(batch).__name__}"
                )
            args, options = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
            total = None
            for i, tally in enumerate(tallies):
                tensors = buffers[i] | space.layout.views(point(i).detach())
                logits = torch.func.functional_call(model, tensors, args, options)
                logs = check_shape("model: logits", logits, None, None).double().log_softmax(-1)
                if bool(logs.isnan().any()):
                    raise DivergenceError(f"{'single' if i == draws else f'members[{i}]'}: its logits are no numbers")
                tally.add(logs, classes)
                if i < draws:
                    total = logs if total is None else torch.logaddexp(total, logs)
            if total is not None:
                together.add(total - torch.tensor(draws).double().log(), classes)
    *members, alone = [tally.score() for tally in tallies]
    return Ensemble(together.score(), tuple(members), alone, drawn)


def _inputs_and_targets(batch: Any, targets: str) -> tuple[Any, Any]:
    """What the model is called with, and the classes where there are any."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != targets}, batch.get(targets)
    if isinstance(batch, tuple | list) and batch:
        return batch[0], batch[1] if len(batch) > 1 else None
    return batch, None


class _ScoreAccumulator:
    """The sums over predictions, batch by batch, that a score is made of."""

    def __init__(self) -> None:
        self._num_samples = 0
        self._num_correct = 0
        self._nll_sum = 0.0

    def add(self, log_probabilities: Float[Tensor, "n classes"], targets: Tensor) -> None:
        """Logarithms of probabilities (n, classes) and the true classes (n,).

        Raises:
            ArgumentError: if these are not n class numbers.
        """
        n, classes = log_probabilities.shape
        if not isinstance(targets, Tensor) or targets.dtype.is_floating_point or targets.dtype.is_complex:
            given = f"{targets.dtype}" if isinstance(targets, Tensor) else type(targets).__name__
            raise ArgumentError(f"targets: expected a tensor of class numbers, got {given}")
        if targets.shape != (n,):
            raise ArgumentError(f"targets: expected shape {(n,)} as there are predictions, got {tuple(targets.shape)}")
        if n and not bool(((targets >= 0) & (targets < classes)).all()):
            given = f"{int(targets.min())} to {int(targets.max())}"
            raise ArgumentError(f"targets: expected classes from 0 to {classes - 1}, got {given}")
        truth = targets.long().to(log_probabilities.device)
        self._num_samples += len(truth)
        self._num_correct += int((log_probabilities.argmax(-1) == truth).sum())
        self._nll_sum -= float(log_probabilities.gather(-1, truth[:, None]).sum())

    def score(self) -> Score:
        if self._num_samples == 0:
            raise ArgumentError("batches: expected at least one sample, got none")
        return Score(self._num_samples, self._num_correct / self._num_samples, self._nll_sum / self._num_samples)
