"""Ensembles, which average the predictions of several models.

The models are drawn from a curve, a simplex or a tunnel (a tube around a curve) in parameter space.
"""

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
    r"""The accuracy and the negative log-likelihood of a classifier on n samples.

    The classifier predicts the class probabilities $p_j$ for sample j, whose true class is $y_j$.

    Attributes:
        samples: the number n of samples.
        accuracy: the fraction of samples whose most probable class is $y_j$. If several classes have the largest
            probability, the first of them counts as the prediction.
        nll: the negative log-likelihood $-\frac1n \sum_j \log p_j(y_j)$, in nats.
    """

    samples: int
    accuracy: float
    nll: float

    def __repr__(self) -> str:
        return format_result(self, samples=self.samples, accuracy=self.accuracy, nll=self.nll)


@dataclass(frozen=True)
class Ensemble:
    r"""The scores of an ensemble of n models, of each member, and of a single model for comparison, on the same data.

    Attributes:
        combined: the score of the ensemble. It predicts the mean $\frac1n \sum_j p_j$ of the class probabilities $p_j$
            that its members predict.
        members: the score of each member.
        single: the score of the single model.
        coordinates: the coordinates of each member in the subspace from which the members were drawn: one number on a
            curve, and a vector on a simplex or a tunnel (a tube around a curve).
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
    r"""Evaluate an ensemble of n models that are drawn from a subspace of the parameter space.

    The subspace is a curve, a simplex or a tunnel (a tube around a curve). It has the control points $\varphi$ and
    maps coordinates $x$ to parameters $\iota_\varphi(x)$. Member j has the parameters $\iota_\varphi(x_j)$, where
    the coordinates $x_j$ are drawn uniformly.

    The prediction of the ensemble is the mean of the class probabilities of its members,
    $\frac1n \sum_j \operatorname{softmax} f_{\iota_\varphi(x_j)}$. Here, $f_\Theta$ are the logits of the network with
    the parameters $\Theta$.

    - The function reads each batch once, and evaluates all models on it.
    - It computes the parameters of each member again for each batch, so only one member is in memory at a time. The
      buffers of all members, such as the statistics of BatchNorm, remain in memory.
    - The module `model` runs in evaluation mode. Its parameters, buffers and modes do not change.

    Args:
        model: a module that maps inputs to logits (n, classes).
        embedding: an embedding on the `ParameterSpace` of the module's parameters.
        phi: $\varphi$, the control points of the embedding.
        batches: pairs (inputs, classes), or mappings that contain the keyword arguments of the model and the classes.
        single: the model (P,) with which the ensemble is compared.
        generator: the random number generator for the coordinates.
        draws: the number $n$ of drawn models.
        refresh: training batches for the statistics of BatchNorm, in the form of `batches` or inputs alone. They are
            required if the model has BatchNorm layers, and are read once for each model. Do not use evaluation data.
        targets: the key of the classes in batches that are mappings.

    Returns:
        The accuracy and NLL of the ensemble, of its members and of the single model, and the drawn coordinates.

    Raises:
        ArgumentError: if an argument is invalid. The message starts with the name of the argument.
        StateDictError: if `model` does not have the layout of the space.
        DivergenceError: if the logits of a model are NaN. The message contains the name of the model.

    Source: Benton et al. 2021, section 5; Garipov et al. 2018.

    Example:
        >>> from manifoldagg.curves import Bezier
        >>> model = nn.Linear(2, 3)
        >>> space = ParameterSpace.of(model)
        >>> curve, single = Bezier(space), torch.zeros(9)
        >>> data = [(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))]
        >>> scores = ensemble(
        ...     model, curve, curve.collapse(single), data, single=single, generator=torch.Generator()
        ... )
        >>> scores.combined.accuracy, round(scores.combined.nll, 4)
        (0.5, 1.0986)
    """
    if not isinstance(embedding, Embedding) or not isinstance(embedding.space, ParameterSpace):
        raise ArgumentError(f"embedding: expected an embedding on a ParameterSpace, got {short_repr(embedding)}")
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
    # This call raises an error if the model does not have the layout of the space.
    space.buffers(model)
    norms = bool(batch_norm_layers(model))
    if norms and refresh is None:
        raise ArgumentError(
            "refresh: expected training batches for the statistics of the model's BatchNorm layers, got None"
        )
    if norms and isinstance(refresh, Iterator):
        raise ArgumentError("refresh: expected batches that can be read once for each model, got an iterator")

    # All coordinates are drawn before the first batch, so each member is the same model for all batches.
    drawn = tuple(x for _, x in Sampling(samples=draws).coordinates(embedding, phi, generator))

    def point(i: int) -> Tensor:
        # The index after the last member is that of the single model.
        return single if i == draws else embedding(phi, drawn[i])

    def statistics(i: int) -> dict[str, Tensor]:
        refreshed = {}
        if norms and refresh is not None:
            inputs = (_inputs_and_targets(batch, targets)[0] for batch in refresh)
            # Wrap tuples, because refresh_buffers would otherwise use only their first element.
            wrapped = ((x,) if isinstance(x, tuple | list) else x for x in inputs)
            try:
                refreshed = refresh_buffers(space, model, point(i), wrapped)
            except ValueError as error:
                raise ArgumentError(f"refresh: {error}") from error
        return {name: refreshed.get(name, buffer).detach().clone() for name, buffer in model.named_buffers()}

    buffers = [statistics(i) for i in range(draws + 1)]
    combined = _ScoreAccumulator()
    accumulators = [_ScoreAccumulator() for _ in buffers]
    with evaluation_mode(model):
        for batch in batches:
            inputs, classes = _inputs_and_targets(batch, targets)
            if classes is None:
                raise ArgumentError(
                    f"batches: expected pairs, or mappings with {targets!r}; got {type(batch).__name__}"
                )
            args, options = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
            total = None
            # The parameters of a member are recomputed for each batch, so only one member is in memory.
            for i, accumulator in enumerate(accumulators):
                tensors = buffers[i] | space.layout.views(point(i).detach())
                logits = torch.func.functional_call(model, tensors, args, options)
                log_probabilities = check_shape("model: logits", logits, None, None).double().log_softmax(-1)
                if bool(log_probabilities.isnan().any()):
                    raise DivergenceError(
                        f"{'single' if i == draws else f'members[{i}]'}: expected finite logits, got NaN"
                    )
                accumulator.add(log_probabilities, classes)
                if i < draws:
                    # Probabilities are added in the logarithmic domain, where small probabilities do not underflow.
                    total = log_probabilities if total is None else torch.logaddexp(total, log_probabilities)
            # The mean is the sum divided by the number of members, which is a difference of logarithms.
            if total is not None:
                combined.add(total - torch.tensor(draws).double().log(), classes)
    *members, single_score = [accumulator.score() for accumulator in accumulators]
    return Ensemble(combined.score(), tuple(members), single_score, drawn)


def _inputs_and_targets(batch: Any, targets: str) -> tuple[Any, Any]:
    """Split a batch into the inputs and the true classes, which are `None` if the batch contains only inputs."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != targets}, batch.get(targets)
    if isinstance(batch, tuple | list) and batch:
        return batch[0], batch[1] if len(batch) > 1 else None
    return batch, None


class _ScoreAccumulator:
    """The sums from which the accuracy and the NLL are computed after the last batch."""

    def __init__(self) -> None:
        self._num_samples = 0
        self._num_correct = 0
        self._nll_sum = 0.0

    def add(self, log_probabilities: Float[Tensor, "n classes"], targets: Tensor) -> None:
        """Add the predictions of a classifier for n samples.

        Args:
            log_probabilities: the predicted log-probabilities of all classes (n, classes).
            targets: the true classes (n,).

        Raises:
            ArgumentError: if `targets` are not n valid class indices.
        """
        n, classes = log_probabilities.shape
        if not isinstance(targets, Tensor) or targets.dtype.is_floating_point or targets.dtype.is_complex:
            given = f"{targets.dtype}" if isinstance(targets, Tensor) else type(targets).__name__
            raise ArgumentError(f"targets: expected a tensor of class numbers, got {given}")
        if targets.shape != (n,):
            raise ArgumentError(f"targets: expected shape {(n,)}, one per prediction, got {tuple(targets.shape)}")
        if n and not bool(((targets >= 0) & (targets < classes)).all()):
            given = f"{int(targets.min())} to {int(targets.max())}"
            raise ArgumentError(f"targets: expected classes from 0 to {classes - 1}, got {given}")
        truth = targets.long().to(log_probabilities.device)
        self._num_samples += len(truth)
        self._num_correct += int((log_probabilities.argmax(-1) == truth).sum())
        self._nll_sum -= float(log_probabilities.gather(-1, truth[:, None]).sum())

    def score(self) -> Score:
        if self._num_samples == 0:
            raise ArgumentError("batches: expected at least one sample, got 0")
        return Score(self._num_samples, self._num_correct / self._num_samples, self._nll_sum / self._num_samples)
