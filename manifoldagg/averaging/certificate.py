r"""Certificates, which describe the quality of the mean of several models.

A certificate contains the distances from the mean to the models, the residual of the mean, and its rounding error.
There is one certificate for each floating-point tensor or pair of LoRA factors. Another certificate describes the whole
model, except the tensors on manifolds.

If a tensor is not on a manifold, all distances in its certificate are computed from the Gram matrix of the models. This
computation needs no additional pass over the tensors.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from manifoldagg._result_repr import format_result
from manifoldagg.averaging.coefficients import InnerProducts, Mean, MeanMethod

__all__ = ["Certificate", "MergeInfo", "certify", "distance_warnings", "total_certificate"]

MAX_ANGLE = math.pi / 4
"""The largest angle between two models, in radians, for which a mean is considered meaningful.

Fine-tuned versions of one model are a few degrees apart. Models of independent training runs are about 90 degrees
apart, and their mean has the loss of an untrained model (Frankle et al. 2020, "Linear mode connectivity").
"""
MIN_NORM_RATIO = 0.9
r"""The smallest ratio $\|\sum_i w_i x_i\| / \sum_i w_i \|x_i\|$ for which an arithmetic mean is considered meaningful.

The mean of k orthogonal models is shorter than the models by the factor $1/\sqrt k$. Each layer then shrinks its
activations, which causes most of the loss barrier between the models (Jordan et al. 2023, "REPAIR").
"""


@dataclass(frozen=True)
class Certificate:
    r"""The quality of one averaged tensor, or of the whole model.

    A distance is the Euclidean norm of the difference of all entries, with one exception: the distances to inputs on a
    manifold are measured along the manifold. `None` means that a value is not defined.

    Attributes:
        name: the name of the tensor, the names of the two factors of an adapter, or `"model"`.
        kind: `"flat"`, `"manifold"`, `"factors"` for a pair of factors of an adapter, or `"model"`.
        size: the number of entries.
        coefficients: the coefficients $c_i$ of the models.
        norm: the norm $\|m\|$ of the mean before rounding.
        distances: the distance from the mean to each input. A model with the weight 0 is not read and has `None`.
        residual: the norm of the Karcher condition $\sum_i w_i \log_m x_i$: in radians for directions, and 0 for an
            arithmetic mean. It is `None` for a point of a curve.
        arithmetic_distance: the distance $\|m - \sum_i w_i x_i\|$ to the arithmetic mean.
        rounding_error: the norm of the difference between the written tensor and the mean before rounding. For factors
            of an adapter, it includes the truncation to the rank. For a manifold, it is the distance of the written
            tensor from the manifold.
        largest_angle: the largest angle between two inputs in radians.
        norm_ratio: the norm of the arithmetic mean, divided by the mean norm of the inputs.
    """

    name: str
    kind: str
    size: int
    coefficients: tuple[float, ...] | None
    norm: float | None
    distances: tuple[float | None, ...]
    residual: float | None
    arithmetic_distance: float | None
    rounding_error: float | None
    largest_angle: float | None = None
    norm_ratio: float | None = None


@dataclass(frozen=True, eq=False)
class MergeInfo:
    """The result of averaging checkpoints: the written files and the quality of the mean.

    The quality is described by certificates, which contain the distances from the mean to the models, the residual of
    the mean, and its rounding error.

    Attributes:
        method: the name of the averaging method, such as `"karcher"`.
        scope: whether the method treats each tensor (`"tensor"`) or the whole model (`"model"`) as one vector.
        inputs: the path of each checkpoint, or `models[i]` for a state dict.
        files: the names of the written files, except the JSON file with the certificates.
        weights: the normalised weights of the checkpoints.
        tensors: one certificate for each floating-point tensor and for each pair of LoRA factors.
        model: one certificate for the whole model, without the tensors on manifolds.
        warnings: reasons why the mean may not be meaningful.
    """

    method: str
    scope: str
    inputs: tuple[str, ...]
    files: tuple[str, ...]
    weights: tuple[float, ...]
    tensors: tuple[Certificate, ...]
    model: Certificate
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        return format_result(self, method=self.method, tensors=len(self.tensors), model=self.model)

    def to_json(self) -> str:
        """Return the certificates as JSON text, which is identical for equal merges."""
        # JSON has no NaN and no infinity, so such a value is an error.
        return json.dumps({"version": 1, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> "MergeInfo":
        """Read the text of `to_json`."""
        tree: dict[str, Any] = json.loads(text)
        del tree["version"]
        tensors = tuple(_certificate(part) for part in tree.pop("tensors"))
        return MergeInfo(tensors=tensors, model=_certificate(tree.pop("model")), **_with_tuples(tree))


def certify(
    name: str,
    kind: str,
    size: int,
    method: MeanMethod,
    mean: Mean,
    products: InnerProducts,
    squared_rounding: float,
) -> Certificate:
    """Compute the certificate of a mean from the inner products of the models.

    Args:
        name: the name of the tensor.
        kind: the kind of the tensor.
        size: the number of entries.
        method: the method and its weights.
        mean: the coefficients of the mean, one for each model.
        products: the inner products of the used models.
        squared_rounding: the squared norm of the rounding errors.
    """
    used = method.used
    c = mean.coefficients[used]
    w = method.weights[used]
    # One product computes all norms: of the mean, of its differences from the inputs, of its difference from the
    # arithmetic mean, and of the arithmetic mean.
    rows = torch.cat([c[None], c - torch.eye(len(used), dtype=torch.float64), (c - w)[None], w[None]])
    norm, *distances, arithmetic, mean_norm = products.squared_norm(rows).sqrt().tolist()
    # At an end of a curve, only one control point is read, so that the mean of all models is unknown.
    is_known = abs(float(w.sum()) - 1.0) < 1e-12
    by_model = dict(zip(used, distances, strict=True))
    average_norm = float(w @ products.norms)
    angles = products.angles()
    return Certificate(
        name=name,
        kind=kind,
        size=size,
        coefficients=tuple(mean.coefficients.tolist()),
        norm=norm,
        distances=tuple(by_model.get(i) for i in range(len(method.weights))),
        residual=0.0 if method.name == "arithmetic" else mean.residual,
        arithmetic_distance=arithmetic if is_known else None,
        rounding_error=math.sqrt(squared_rounding),
        largest_angle=float(angles.max()) if angles.numel() > 1 else None,
        norm_ratio=mean_norm / average_norm if average_norm > 0 and is_known else None,
    )


def total_certificate(
    certificates: Sequence[Certificate], method: MeanMethod, products: InnerProducts | None, mean: Mean | None
) -> Certificate:
    """Compute the certificate of the whole model.

    Args:
        certificates: the certificates of all tensors.
        method: the method and its weights.
        products: the inner products of the models over all flat tensors and factors, or `None` if there are none.
        mean: the mean of the whole model, or `None` if each tensor has its own coefficients.
    """
    parts = [part for part in certificates if part.coefficients is not None]
    size = sum(part.size for part in parts)
    k = len(method.weights)

    # The tensors of a model are orthogonal blocks, so squares add up. `fsum` rounds once, so the order of the tensors
    # has no effect.
    def root(values: Sequence[float | None]) -> float | None:
        return None if None in values or not values else math.sqrt(math.fsum(x * x for x in values if x is not None))

    residuals = [part.residual for part in parts]
    total = Certificate(
        name="model",
        kind="model",
        size=size,
        coefficients=None if mean is None else tuple(mean.coefficients.tolist()),
        norm=root([part.norm for part in parts]),
        distances=tuple(root([part.distances[i] for part in parts]) for i in range(k)),
        residual=root(residuals) if mean is None else mean.residual,
        arithmetic_distance=root([part.arithmetic_distance for part in parts]),
        # For a manifold, the certificate contains a distance from the manifold, which is not a rounding error of
        # entries.
        rounding_error=root([part.rounding_error for part in certificates if part.kind != "manifold"]),
    )
    if products is None:
        return total
    # For a Bézier curve, the barycentric weights are the weights of the control points at the parameter t.
    w = method.barycentric[method.used]
    average_norm = float(w @ products.norms)
    angles = products.angles()
    return replace(
        total,
        largest_angle=float(angles.max()) if angles.numel() > 1 else None,
        norm_ratio=float(products.squared_norm(w).sqrt()) / average_norm if average_norm > 0 else None,
    )


def distance_warnings(model: Certificate) -> list[str]:
    """Return warnings if models are so far apart that their mean may not be meaningful.

    The function returns a warning for each of these conditions:

    - The largest angle between two models exceeds `MAX_ANGLE`.
    - The norm of the arithmetic mean, divided by the mean norm of the models, is below `MIN_NORM_RATIO`.
    """
    found = []
    if model.largest_angle is not None and model.largest_angle > MAX_ANGLE:
        angle = math.degrees(model.largest_angle)
        limit = math.degrees(MAX_ANGLE)
        found.append(
            f"models: expected angles of at most {limit:.0f} degrees between the models, got {angle:.0f} degrees; "
            "the models do not seem to be versions of one model, so their mean may not be meaningful"
        )
    if model.norm_ratio is not None and model.norm_ratio < MIN_NORM_RATIO:
        found.append(
            f"models: expected an arithmetic mean of at least {MIN_NORM_RATIO:.0%} of the mean norm, got "
            f"{model.norm_ratio:.0%}; a loss barrier between the models is likely"
        )
    return found


def _certificate(part: Mapping[str, Any]) -> Certificate:
    """Build a certificate from its JSON tree."""
    return Certificate(**_with_tuples(part))


def _with_tuples(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the lists of a JSON tree back to the tuples of a dataclass."""
    return {key: tuple(x) if type(x) is list else x for key, x in tree.items()}
