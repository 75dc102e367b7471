"""Deliberately wrong spheres and flat spaces: each must be caught by the laws named beside it."""

import math
from dataclasses import dataclass

import torch

from manifoldagg.manifolds import Flat, Sphere


def dot(u, v):
    return (u * v).sum(-1, keepdim=True)


MUTANTS = {}


def caught_by(*laws):
    def register(cls):
        MUTANTS[cls.__name__] = (dataclass(frozen=True)(cls), laws)
        return cls

    return register


@caught_by("log_inverts_exp")
class ExpWithTheWrongSign(Sphere):
    def _exp(self, x, u):
        return super()._exp(x, -u)


@caught_by("exp_distance_equals_tangent_norm")
class ExpIsARetraction(Sphere):
    def _exp(self, x, u):
        return self._project(x + u)


@caught_by("exp_lands_on_the_manifold")
class ExpWithoutSinc(Sphere):
    def _exp(self, x, u):
        return dot(u, u).sqrt().cos() * x + u


@caught_by("exp_lands_on_the_manifold")
class ExpClampedAtSmallAngles(Sphere):
    def _exp(self, x, u):
        t = dot(u, u).sqrt().clamp(min=1e-4)
        return t.cos() * x + t.sin() / t * u


@caught_by("gradients_are_finite_at_zero_length")
class ExpWithNaNGradientAtZero(Sphere):
    def _exp(self, x, u):
        t = dot(u, u).sqrt()
        return t.cos() * x + torch.where(t > 0, t.sin() / t, 1.0) * u


@caught_by("log_inverts_exp")
class ExpTwiceAsFar(Sphere):
    def _exp(self, x, u):
        return super()._exp(x, 2 * u)


@caught_by("geodesics_have_constant_speed")
class ExpAndLogWithAWarpedClock(Sphere):
    """Inverse to one another, and still no geodesics: length t is walked as t + t²/10."""

    def _exp(self, x, u):
        return super()._exp(x, u * (1 + dot(u, u).sqrt() / 10))

    def _log(self, x, y):
        v = super()._log(x, y)
        s = dot(v, v).sqrt()
        return v * ((math.sqrt(1) * (1 + 0.4 * s).sqrt() - 1) * 5 / s.clamp(min=1e-300))


@caught_by("exp_distance_equals_tangent_norm", "log_inverts_exp")
class LogIsOnlyAProjection(Sphere):
    def _log(self, x, y):
        return self._project_tangent(x, y)


@caught_by("log_inverts_exp", "logs_and_transports_are_tangent")
class LogWithSwappedArguments(Sphere):
    def _log(self, x, y):
        return super()._log(y, x)


@caught_by("log_inverts_exp")
class LogByArccosine(Sphere):
    """Loses half of the digits of a small angle."""

    def _log(self, x, y):
        v = self._project_tangent(x, y)
        return dot(x, y).clamp(-1, 1).acos() / dot(v, v).sqrt() * v


@caught_by("log_inverts_exp")
class LogByArcsine(Sphere):
    """Right up to a quarter of a turn."""

    def _log(self, x, y):
        v = self._project_tangent(x, y)
        s = dot(v, v).sqrt().clamp(max=1)
        return torch.where(s > 0, s.asin() / s, 1.0) * v


@caught_by("log_inverts_exp")
class LogInFloat32(Sphere):
    def _log(self, x, y):
        return super()._log(x.float(), y.float()).to(x.dtype)


@caught_by("pole_ladder_equals_transport", "transport_is_an_isometry")
class TransportIsAProjection(Sphere):
    def _transport(self, x, y, u):
        return self._project_tangent(y, u)


@caught_by("logs_and_transports_are_tangent")
class TransportDoesNothing(Sphere):
    def _transport(self, x, y, u):
        return u


@caught_by("logs_and_transports_are_tangent")
class TransportTheOtherWay(Sphere):
    def _transport(self, x, y, u):
        return super()._transport(y, x, u)


@caught_by("transport_is_an_isometry")
class TransportWithoutAFactor(Sphere):
    def _transport(self, x, y, u):
        return u - dot(y, u) / dot(x + y, x + y) * (x + y)


@caught_by("transport_preserves_geodesic_velocity")
class TransportReflects(Sphere):
    """An isometry of tangent spaces, linear, its own inverse, and not the parallel one."""

    def _transport(self, x, y, u):
        d = y - x
        square = dot(d, d)
        return torch.where(square > 0, u - 2 * dot(d, u) / square.clamp(min=1e-300) * d, u)


@caught_by("transport_is_linear", "transport_is_an_isometry")
class TransportShortensLongTangents(Sphere):
    def _transport(self, x, y, u):
        v = super()._transport(x, y, u)
        return v / (1 + 0.1 * dot(v, v))


@caught_by("gradient_of_squared_distance_is_minus_two_log", "transport_is_an_isometry")
class InnerDependsOnThePlace(Sphere):
    def _inner(self, x, u, v):
        return super()._inner(x, u, v) * (1 + 0.1 * x[..., 0] ** 2)


@caught_by("inner_is_an_inner_product")
class InnerIsNotSymmetric(Sphere):
    def _inner(self, x, u, v):
        return super()._inner(x, u, v) + 0.01 * u[..., 0] * v[..., 1]


@caught_by("project_tangent_is_orthogonal", "projections_are_idempotent")
class ProjectTangentSubtractsThePoint(Sphere):
    def _project_tangent(self, x, u):
        return u - x


@caught_by("project_tangent_is_orthogonal")
class ProjectTangentIsOblique(Sphere):
    """Idempotent, but along an axis."""

    def _project_tangent(self, x, u):
        axis = torch.zeros_like(x)
        axis[..., 0] = 1
        return u - dot(x, u) / x[..., :1] * axis


@caught_by("log_inverts_exp")
class InjectivityRadiusTooLarge(Sphere):
    def _injectivity_radius(self, x):
        return x.new_full(x.shape[:-1], 2 * math.pi)


@caught_by("retractions_agree_with_exp_to_second_order")
class RetractIsOfFirstOrder(Sphere):
    def _retract(self, x, u):
        return self._exp(x, u * (1 + dot(u, u).sqrt()))


@caught_by("derivative_of_retract_at_zero_is_identity", "inverse_retract_inverts_retract")
class RetractTwiceAsFar(Sphere):
    def _retract(self, x, u):
        return super()._retract(x, 2 * u)


@caught_by("inverse_retract_inverts_retract")
class InverseRetractIsALog(Sphere):
    def _inverse_retract(self, x, y):
        return self._log(x, y)


@caught_by("inverse_retract_inverts_retract")
class InverseRetractIsOnlyAProjection(Sphere):
    def _inverse_retract(self, x, y):
        return self._project_tangent(x, y)


@caught_by("retractions_are_independent_across_batch")
class RetractionsThatSeeOneAnother(Sphere):
    def _retract(self, x, u):
        return super()._retract(x, u * (1 + 1e-3 * (u.ndim > 1)))


@caught_by("the_gradient_represents_the_derivative")
class GradientTwiceAsLong(Sphere):
    def _gradient(self, x, derivative):
        return 2 * super()._gradient(x, derivative)


@caught_by("projections_are_idempotent")
class ProjectHalfway(Sphere):
    def _project(self, x):
        return (x + super()._project(x)) / 2


@caught_by("projections_are_idempotent", "exp_lands_on_the_manifold")
class RandomTangentsThatAreNotTangent(Sphere):
    def _random_tangent(self, x, generator):
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)


@caught_by("random_draws_are_reproducible")
class DrawsThatIgnoreTheirGenerator(Sphere):
    def _random_point(self, batch, generator, dtype):
        return self._project(torch.randn(*batch, self.n, dtype=dtype))


@caught_by("operations_are_independent_across_batch")
class BatchesThatSeeOneAnother(Sphere):
    def _inner(self, x, u, v):
        result = super()._inner(x, u, v)
        return result + 1e-3 * (result.mean() - result)


@caught_by("log_inverts_exp", "geodesics_are_reversible")
class FlatLogBackwards(Flat):
    def _log(self, x, y):
        return x - y


@caught_by("log_inverts_exp")
class FlatLogForgetsTheFirstCoordinate(Flat):
    def _log(self, x, y):
        v = (y - x).clone()
        v[..., 0] = 0
        return v


@caught_by("transport_is_an_isometry")
class FlatTransportGrows(Flat):
    def _transport(self, x, y, u):
        return 1.01 * u
