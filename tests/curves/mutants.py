"""Deliberately wrong Bézier curves: each must be caught by the laws named beside it."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from manifoldagg.curves import Bezier
from manifoldagg.manifolds import Flat, Sphere, geodesic

MUTANTS = {}


def caught_by(*laws, space=Flat(3), degree=3):  # noqa: B008  # spaces are frozen values
    def register(cls):
        MUTANTS[cls.__name__] = (dataclass(frozen=True)(cls)(space, degree), laws)
        return cls

    return register


def on_the_sphere(*laws, degree=3):
    return caught_by(*laws, space=Sphere(3), degree=degree)


def number(t, phi):
    return torch.as_tensor(t, dtype=torch.float64)[..., None]


def summed(weights, phi):
    return torch.cat(weights, -1).to(phi.dtype) @ phi


@caught_by("a_collapsed_curve_is_one_point", "a_curve_is_the_geodesic_between_curves_of_lower_degree")
class WithoutBinomials(Bezier):
    def __call__(self, phi, t):
        t, n = number(t, phi), self.degree
        return summed([t**i * (1 - t) ** (n - i) for i in range(n + 1)], phi)


@caught_by("a_curve_is_the_geodesic_between_curves_of_lower_degree")
class BinomialsOfTheNextDegree(Bezier):
    def __call__(self, phi, t):
        t, n = number(t, phi), self.degree
        return summed([math.comb(n + (0 < i < n), i) * t**i * (1 - t) ** (n - i) for i in range(n + 1)], phi)


@caught_by("a_curve_starts_and_ends_at_its_end_points")
class TimeRunsBackwards(Bezier):
    def __call__(self, phi, t):
        return super().__call__(phi, 1 - t)


@caught_by("a_collapsed_curve_is_one_point", degree=2)
class MiddleTermCountedOnce(Bezier):
    """t(1 - t) in place of 2t(1 - t): the weights sum to 1 - t + t²."""

    def __call__(self, phi, t):
        t = number(t, phi)
        return summed([(1 - t) ** 2, t * (1 - t), t**2], phi)


@caught_by("a_curve_starts_and_ends_at_its_end_points")
class WithoutItsEnd(Bezier):
    def __call__(self, phi, t):
        return super().__call__(phi, t) - number(t, phi) ** self.degree * phi[-1]


@caught_by("a_curve_is_the_geodesic_between_curves_of_lower_degree")
class InFloat32(Bezier):
    def __call__(self, phi, t):
        return super().__call__(phi.float(), t).to(phi.dtype)


@caught_by("a_curve_is_the_geodesic_between_curves_of_lower_degree")
class StaysInsideOfTheInterval(Bezier):
    def __call__(self, phi, t):
        return super().__call__(phi, torch.as_tensor(t).clamp(0, 1))


@caught_by("a_batch_of_parameters_is_a_loop")
class LooksAtTheFirstParameter(Bezier):
    def __call__(self, phi, t):
        t = torch.as_tensor(t)
        return super().__call__(phi, t.flatten()[0].expand_as(t))


@caught_by("a_velocity_is_the_derivative", "the_first_velocity_points_to_the_first_control_point")
class HodographWithoutItsFactor(Bezier):
    def velocity(self, phi, t):
        return super().velocity(phi, t) / self.degree


@caught_by("a_velocity_is_the_derivative")
class VelocityOfTheChord(Bezier):
    def velocity(self, phi, t):
        return (phi[-1] - phi[0]).expand(super().velocity(phi, t).shape)


@caught_by("an_acceleration_is_the_second_derivative")
class AccelerationWithoutItsFactor(Bezier):
    def acceleration(self, phi, t):
        return super().acceleration(phi, t) / (self.degree * (self.degree - 1))


@caught_by("a_derivative_reaches_the_control_points_by_the_chain_rule")
class PullForgetsTheWeights(Bezier):
    def pull_phi(self, phi, x, w):
        return w.reshape(-1, *phi.shape[1:]).sum(0).expand_as(phi)


@caught_by("parts_follow_the_curve")
class SplitAtTheWrongSide(Bezier):
    def split(self, phi, t):
        return super().split(phi, 1 - t)


@caught_by("parts_follow_the_curve")
class PartsSwapped(Bezier):
    def split(self, phi, t):
        return super().split(phi, t)[::-1]


@caught_by("parts_follow_the_curve")
class LastPartRunsBackwards(Bezier):
    def split(self, phi, t):
        left, right = super().split(phi, t)
        return left, right.flip(0)


@caught_by("an_elevated_curve_follows_the_curve")
class ElevationOffByOne(Bezier):
    def elevate(self, phi, times=1):
        n = self.degree
        inner = [geodesic(self.space, phi[i], phi[i - 1], (i - 1) / n) for i in range(1, n + 1)]
        return torch.stack([phi[0], *inner, phi[-1]])


@on_the_sphere("an_elevated_curve_follows_the_curve")
class ElevationTheOtherWay(Bezier):
    def elevate(self, phi, times=1):
        n = self.degree
        inner = [geodesic(self.space, phi[i - 1], phi[i], i / (n + 1)) for i in range(1, n + 1)]
        return torch.stack([phi[0], *inner, phi[-1]])


@caught_by("a_reversed_curve_runs_backwards")
class ReverseForgetsTheMiddle(Bezier):
    def reverse(self, phi):
        return torch.cat([phi[-1:], phi[1:-1], phi[:1]])


@caught_by("a_length_is_the_sum_of_small_distances")
class LengthIsTheChord(Bezier):
    def length(self, phi, a=0.0, b=1.0):
        return (self(phi, b) - self(phi, a)).norm()


@caught_by("a_length_is_the_sum_of_small_distances")
class LengthIsThePolygon(Bezier):
    def length(self, phi, a=0.0, b=1.0):
        return (b - a) * phi.diff(dim=0).norm(dim=-1).sum()


@caught_by("a_length_is_the_sum_of_small_distances", "a_length_lies_between_chord_and_polygon")
class LengthWithoutSpeed(Bezier):
    def length(self, phi, a=0.0, b=1.0):
        return phi.new_tensor(b - a)


@caught_by("the_parameter_at_a_part_of_the_length_inverts_it")
class PartOfTheParameter(Bezier):
    def parameter_at_length(self, phi, fraction):
        return torch.as_tensor(fraction, dtype=torch.float64)


@caught_by("the_parameter_at_a_part_of_the_length_inverts_it")
class AlwaysTheMiddle(Bezier):
    def parameter_at_length(self, phi, fraction):
        return super().parameter_at_length(phi, torch.full_like(torch.as_tensor(fraction), 0.5))


@caught_by("no_place_is_nearer_than_the_nearest")
class NearestControlPoint(Bezier):
    def nearest(self, phi, point):
        away = (point[..., None, :] - phi).norm(dim=-1)
        return away.argmin(-1) / self.degree, away.amin(-1)


@caught_by("no_place_is_nearer_than_the_nearest")
class NearestFromTheStart(Bezier):
    def nearest(self, phi, point):
        t = torch.zeros(point.shape[:-1], dtype=torch.float64)
        return t, (point - self(phi, t)).norm(dim=-1)


@caught_by("a_collapsed_curve_is_one_point")
class CollapseToZero(Bezier):
    def collapse(self, point):
        return torch.zeros_like(super().collapse(point))


@on_the_sphere("a_curve_is_the_geodesic_between_curves_of_lower_degree")
class AlongRetractions(Bezier):
    def __call__(self, phi, t):
        t = number(t, phi)
        rows = list(phi)
        while len(rows) > 1:
            rows = [self.space.project((1 - t) * x + t * y) for x, y in pairwise(rows)]
        return rows[0].reshape(*t.shape[:-1], -1)


@on_the_sphere("points_lie_on_the_space")
class ArithmeticMeanOnTheSphere(Bezier):
    def __call__(self, phi, t):
        return Bezier(Flat(3), self.degree)(phi, t)


@on_the_sphere("a_curve_is_the_geodesic_between_curves_of_lower_degree")
class MeanBroughtBackToTheSphere(Bezier):
    def __call__(self, phi, t):
        return self.space.project(Bezier(Flat(3), self.degree)(phi, t))


@on_the_sphere("a_velocity_is_the_derivative")
class FlatHodographOnTheSphere(Bezier):
    def velocity(self, phi, t):
        flat = Bezier(Flat(3), self.degree).velocity(phi, t)
        return self.space.project_tangent(self(phi, t), flat)


@on_the_sphere("an_acceleration_is_the_second_derivative")
class AccelerationOfCoordinates(Bezier):
    """Not tangent: it holds what keeps the curve on the sphere."""

    def acceleration(self, phi, t):
        t = torch.as_tensor(t, dtype=torch.float64)
        return torch.func.jvp(lambda s: self.velocity(phi, s), (t,), (torch.ones_like(t),))[1]


@on_the_sphere("a_length_is_the_sum_of_small_distances")
class LengthBelowTheChord(Bezier):
    """Of the straight line between the ends, which cuts through the sphere."""

    def length(self, phi, a=0.0, b=1.0):
        return (phi[-1] - phi[0]).norm() * (b - a)
