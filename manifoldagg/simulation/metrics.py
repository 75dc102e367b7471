"""Metrics of a model on held-out samples: accuracy, or AUROC and AUPRC for multi-label classification."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError

__all__ = ["Criterion", "Metric", "accuracy", "macro_auprc", "macro_auroc"]


@runtime_checkable
class Criterion(Protocol):
    """A loss function of scores and labels, such as `torch.nn.functional.cross_entropy`."""

    def __call__(self, scores: Any, labels: Any, /, *, reduction: str = "mean") -> Tensor:
        """Return the mean loss, or the losses (samples, ...) if `reduction` is `"none"`."""


@dataclass(frozen=True)
class Metric:
    """A metric of the scores of a model, computed in two steps so that an evaluation does not store all scores.

    An evaluation calls `statistics` for each batch. It then calls `compute` for the statistics of all held-out samples,
    and for the statistics of the held-out samples of each client. Metrics with the same function `statistics` share its
    results. Both functions must be picklable for runs with worker processes.

    Attributes:
        statistics: a function of the scores (samples, ...) and the labels of a batch. It returns a tensor
            (samples, ...) with the statistics of each sample.
        compute: a function of the statistics, an array (samples, ...), that returns the metric. NaN means that the
            metric is undefined for these samples.

    Example:
        >>> confidence = Metric(lambda scores, labels: scores.softmax(1).amax(1), lambda values: float(values.mean()))
        >>> confidence(torch.zeros(3, 4), torch.zeros(3))
        0.25
    """

    statistics: Callable[[Tensor, Tensor], Tensor]
    compute: Callable[[np.ndarray], float]

    def __call__(self, scores: Tensor, labels: Tensor) -> float:
        """Compute the metric of all samples at once."""
        return self.compute(self.statistics(scores, labels).numpy())


def _correct(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of correct predictions among the one or more labels of each sample."""
    return (scores.argmax(1) == labels).double().view(len(labels), -1).mean(1)


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def _scores_and_labels(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the scores and the labels of each sample, (samples, 2, labels) in float64."""
    return torch.stack([scores.double(), labels.double()], 1)


def _macro_auroc(values: np.ndarray) -> float:
    return _macro_average("roc_auc_score", values)


def _macro_auprc(values: np.ndarray) -> float:
    return _macro_average("average_precision_score", values)


def _macro_average(function: str, values: np.ndarray) -> float:
    """Average a scikit-learn metric over the labels with positive and negative samples."""
    try:
        from scipy.stats import rankdata
        from sklearn import metrics
    except ModuleNotFoundError:
        raise ArgumentError("expected scikit-learn to be installed: pip install 'manifoldagg[experiments]'") from None
    scores, labels = values[:, 0], values[:, 1] > 0
    used = labels.any(0) & ~labels.all(0)
    if not used.any():
        return float("nan")
    # Only the order of the scores matters. Ranks are finite, as scikit-learn requires, for a diverged model too.
    ranks = rankdata(np.nan_to_num(scores[:, used], nan=-np.inf, posinf=np.inf, neginf=-np.inf), "dense", axis=0)
    return float(getattr(metrics, function)(labels[:, used], ranks, average="macro"))


accuracy = Metric(_correct, _mean)
"""The fraction of correct predictions.

If each token of a sequence has a label, it is the fraction of correct tokens in a sequence, averaged over the
sequences.
"""

macro_auroc = Metric(_scores_and_labels, _macro_auroc)
"""The mean over labels of the area under the ROC curve, for labels (samples, labels) of zeros and ones.

The mean includes each label that at least one sample has and at least one sample does not have, because the area is
undefined for other labels. If there is no such label, the metric is NaN. A score that is not finite counts as the
lowest or the highest score. The areas are those of scikit-learn.
"""

macro_auprc = Metric(_scores_and_labels, _macro_auprc)
"""The mean over labels of the average precision, which approximates the area under the precision-recall curve.

The mean includes the same labels as in `macro_auroc`, and the average precision is that of scikit-learn.
"""
