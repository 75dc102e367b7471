"""Mutants: deliberately wrong corrections. The laws named in `caught_by` must detect each mutant."""

from dataclasses import dataclass, field, replace

import torch

from manifoldagg.corrections import (
    AutoThreshold,
    Composition,
    CorrectionQuality,
    DelayCompensated,
    GradientSurgery,
    Gram,
    OrthoCorrect,
    OrthoDC,
    OrthoDyn,
    Pairwise,
    Position,
    Tangent,
    calibrate,
    correction_quality,
    rotate_control,
)

MUTANTS = {}


def caught_by(name, *laws):
    def register(thing):
        made = dataclass(frozen=True, repr=False, eq=False)(thing) if isinstance(thing, type) else thing
        MUTANTS[thing.__name__] = ({name: made}, laws)
        return thing

    return register


@caught_by("Tangent", "tangent_is_the_displacement")
class TangentNegated(Tangent):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        return -lines, state


@caught_by("Position", "position_points_to_the_client_model")
class PositionWithTheWrongSignOfDrift(Position):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        lines[..., -1] *= -1
        return lines, state


@caught_by("Position", "position_on_a_sphere_points_to_the_client_model")
class PositionAsDifferenceOfRowsOnCurvedSpaces(Position):
    def extend(self, frame, state=None):
        return frame


@caught_by("OrthoDC", "projections_are_orthogonal_to_the_drift", "pythagoras")
class OrthoDCWithTheWrongSignOfDrift(OrthoDC):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        lines[..., -1] *= -1
        return lines, state


@caught_by("OrthoDC", "the_removed_component_is_parallel_to_the_drift", "projections_are_orthogonal_to_the_drift")
class OrthoDCDividesByTheDisplacement(OrthoDC):
    """OrthoDC that divides by the squared length of the displacement instead of that of the drift."""

    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        for i, line in enumerate(lines):
            line[-1] = line[-1] * gram.matrix[-1, -1] / gram.matrix[i, i]
        return lines, state


@caught_by("OrthoDC", "projections_are_orthogonal_to_the_drift", "pythagoras")
class OrthoDCReflects(OrthoDC):
    """OrthoDC that removes the parallel component twice."""

    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        lines[..., -1] *= 2
        return lines, state


class ByCosine(OrthoDC):
    """OrthoDC that compares the computed cosine with the threshold, without clipping."""

    def far(self, cosine):
        return cosine > self.threshold

    def coefficients(self, gram, state=None):
        n, inner, lines = gram.num_displacements, gram.matrix, gram.identity()
        for i in range(n):
            scale = (inner[i, i] * inner[n, n]) ** 0.5
            if scale != 0 and not self.far(inner[i, n] / scale):
                lines[i, n] = -inner[i, n] / inner[n, n]
        return lines, state


@caught_by("OrthoDC", "the_extreme_thresholds_ignore_the_cosine")
class OrthoDCWithoutClippingTheCosine(ByCosine):
    pass


@caught_by("OrthoDC", "the_threshold_selects_by_the_cosine")
class OrthoDCWithTheReverseComparison(ByCosine):
    def far(self, cosine):
        return abs(self.threshold) < 1 and cosine < self.threshold


@caught_by("OrthoDC", "the_threshold_selects_by_the_cosine")
class OrthoDCComparesTheAbsoluteCosine(ByCosine):
    def far(self, cosine):
        return abs(cosine) > self.threshold


@caught_by("OrthoDC", "the_threshold_selects_by_the_cosine")
class OrthoDCComparesTheSquaredCosine(ByCosine):
    def far(self, cosine):
        return cosine * abs(cosine) > self.threshold


@caught_by("OrthoDC", "the_threshold_selects_by_the_cosine")
class OrthoDCComparesTheInnerProduct(OrthoDC):
    def coefficients(self, gram, state=None):
        n, inner, lines = gram.num_displacements, gram.matrix, gram.identity()
        for i in range(n):
            if inner[n, n] != 0 and inner[i, n] <= self.threshold:
                lines[i, n] = -inner[i, n] / inner[n, n]
        return lines, state


@caught_by("OrthoDC", "tensors_are_corrected_separately")
class OrthoDCOfTheWholeModel(OrthoDC):
    def coefficients(self, gram, state=None):
        return OrthoDC(self.threshold).coefficients(gram, state)


@caught_by("OrthoDC", "zero_vectors_are_unchanged")
class OrthoDCDividesByZero(OrthoDC):
    def coefficients(self, gram, state=None):
        n, inner, lines = gram.num_displacements, gram.matrix, gram.identity()
        for i in range(n):
            lines[i, n] = -(torch.tensor(inner[i, n]) / torch.tensor(inner[n, n])).item()
        return lines, state


@caught_by("OrthoDC", "projections_are_orthogonal_to_the_drift")
class OrthoDCWithAnEpsilonInTheDenominator(OrthoDC):
    def coefficients(self, gram, state=None):
        inner = gram.matrix.copy()
        inner[-1, -1] += 1e-8 * (inner[-1, -1] > 0)
        return super().coefficients(Gram.of(inner), state)


@caught_by("OrthoDC", "composition_is_sequential")
class CompositionInTheWrongOrder(OrthoDC):
    def __rshift__(self, other):
        return Composition((other, self))


@caught_by(
    "DelayCompensated",
    "delay_compensation_equals_its_formula",
    "delay_compensation_vanishes_to_first_order_on_quartics",
)
class DelayCompensatedWithTheWrongSign(DelayCompensated):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        lines[:, gram.num_displacements + 1 :] *= -1
        return lines, state


@caught_by("DelayCompensated", "delay_compensation_equals_its_formula")
class DelayCompensatedWithoutTheSquare(DelayCompensated):
    def extend(self, frame, state=None):
        n = frame.num_displacements
        for i in range(n):
            frame = frame.with_row(f"v{i + 1}*v{i + 1}*g", frame.row(i) * frame.row(n))
        return frame


@caught_by(
    "DelayCompensated",
    "delay_compensation_by_the_outer_product_equals_its_formula",
    "delay_compensation_by_the_outer_product_is_coordinate_free",
)
class OuterProductWithTheWrongSign(DelayCompensated):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        return (2 * gram.identity() - lines if self.form == "outer" else lines), state


@caught_by(
    "DelayCompensated",
    "delay_compensation_by_the_outer_product_equals_its_formula",
    "delay_compensation_by_the_outer_product_is_coordinate_free",
)
class OuterProductWithTheCoefficientOfTheLastRow(DelayCompensated):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        if self.form == "outer":
            for i in range(len(lines)):
                lines[i, i] = lines[-1, len(lines) - 1]
        return lines, state


@caught_by("DelayCompensated", "delay_compensation_follows_the_mean_square")
class MeanSquareWithoutTheCurrentUpdate(DelayCompensated):
    """DelayCompensated whose mean square excludes the current update."""

    def _mean_square(self, frame, state):
        fresh = super()._mean_square(frame, state)
        known = fresh if state is None else state["mean_square"].double().clone()
        return known


@caught_by("DelayCompensated", "delay_compensation_follows_the_mean_square")
class MeanSquareWithoutHistory(DelayCompensated):
    def _mean_square(self, frame, state):
        return super()._mean_square(frame, None)


@caught_by("OrthoCorrect", "ortho_correct_equals_its_formula")
class OrthoCorrectAddsTheDrift(OrthoCorrect):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        lines[lines == -self.alpha] *= -1
        return lines, state


@caught_by("OrthoCorrect", "zero_vectors_are_unchanged")
class OrthoCorrectShiftsZeroDisplacements(OrthoCorrect):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        for i, line in enumerate(lines):
            line[-1] = line[-1] if gram.matrix[i, i] else -self.alpha
        return lines, state


@caught_by("OrthoPos", "named_corrections_equal_their_parameters")
def ortho_pos_with_half_the_drift(**options):
    return OrthoCorrect(0.5, 0.0, **options)


@caught_by("OrthoPos", "the_clipped_position_is_surgery_on_the_position")
def ortho_pos_never_clips(clip=False, **options):
    return OrthoCorrect(1.0, 0.0, **options)


@caught_by("OrthoGrad", "named_corrections_equal_their_parameters")
def ortho_grad_with_the_drift(**options):
    return OrthoCorrect(1.0, 0.0, **options)


@caught_by("OrthoStrict", "named_corrections_equal_their_parameters", "zero_vectors_are_unchanged")
def ortho_strict_is_position(**options):
    return Position()


@caught_by("GradientSurgery", "surgery_processes_the_rows_in_order")
class SurgeryFromOriginalRows(GradientSurgery):
    """Surgery that computes all conflicts from the original row."""

    def coefficients(self, gram, state=None):
        inner, lines = gram.matrix, gram.identity()
        for i, line in enumerate(lines):
            for j in range(len(inner)):
                if j != i and inner[i, j] < 0:
                    line[j] -= inner[i, j] / inner[j, j]
        return lines, state


@caught_by("GradientSurgery", "surgery_processes_the_rows_in_order")
class SurgeryWithoutTheDrift(GradientSurgery):
    def coefficients(self, gram, state=None):
        inner = gram.matrix.copy()
        inner[-1, -1] = 0.0
        return super().coefficients(Gram.of(inner), state)


@caught_by("Pairwise", "pairwise_is_orthogonal_to_every_other")
class PairwiseWithoutOrthogonalization(Pairwise):
    """Pairwise that removes the component along each row as if the rows were orthogonal."""

    def coefficients(self, gram, state=None):
        n, inner, lines = gram.num_displacements, gram.matrix, gram.identity()
        for i in range(n):
            for j in range(n + 1, len(inner)):
                lines[i, j] = -inner[i, j] / inner[j, j]
        return lines, state


@caught_by("Pairwise", "pairwise_is_orthogonal_to_every_other")
class PairwiseWithoutTheLastRows(Pairwise):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        lines[:, -3:] = 0
        return lines, state


@caught_by("OrthoDyn", "the_dynamic_correction_changes_with_the_straightness")
class OrthoDynRestartsItsPhase(OrthoDyn):
    def _update_phase(self, gram, coefficients, length, phase):
        return super()._update_phase(gram, coefficients, length, "gradient")


@caught_by("OrthoDyn", "the_dynamic_correction_changes_with_the_straightness")
class OrthoDynWithoutHysteresis(OrthoDyn):
    hysteresis: float = field(default=0.0, kw_only=True)


@caught_by("AutoThreshold", "the_chosen_threshold_is_nearest_to_the_fresh_update")
class AutoThresholdWithHalfTheBound(AutoThreshold):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        n, inner, beta = len(lines), gram.matrix, state["slope"]
        if inner[n - 1, n] ** 2 > beta * inner[n, n] * inner[n - 1, n] and state["threshold"] == 1:
            lines, state["threshold"] = gram.identity(), -1
        return lines, state


@caught_by("AutoThreshold", "the_chosen_threshold_is_nearest_to_the_fresh_update")
class AutoThresholdWithTheCurrentModelAsBase(AutoThreshold):
    """AutoThreshold that stores the current model as the base of the update."""

    def update_state(self, frame, coefficients, state):
        moved = super().update_state(frame, coefficients, state)
        return {**moved, "base": moved["base"] + frame.row(frame.num_displacements)}


@caught_by(
    "rotate_control",
    "a_rotated_control_point_keeps_its_position_relative_to_the_chord",
    "parallel_chords_do_not_rotate",
)
def rotation_about_the_start(control, base, end, current, corrected_end):
    return rotate_control(control, base, end, current, corrected_end) + (corrected_end - current) / 2


@caught_by("rotate_control", "a_rotated_control_point_keeps_its_position_relative_to_the_chord")
def rotation_backwards(control, base, end, current, corrected_end):
    return rotate_control(control, base, corrected_end - current + base, current, current + end - base)


@caught_by("rotate_control", "a_rotated_control_point_keeps_its_position_relative_to_the_chord")
def no_rotation(control, base, end, current, corrected_end):
    return control - (base + end) / 2 + (current + corrected_end) / 2


@caught_by("rotate_control", "opposite_chords_negate_only_the_component_along_the_chord")
def opposite_chords_negate_all_components(control, base, end, current, corrected_end):
    a, b = end - base, corrected_end - current
    if a @ b <= -0.999999 * a.norm() * b.norm():
        return (current + corrected_end) / 2 - (control - (base + end) / 2)
    return rotate_control(control, base, end, current, corrected_end)


@caught_by("calibrate", "calibration_adds_the_orthogonal_component_of_the_shift")
def calibration_projects_the_other_vector(start, global_shift, client_shift, *args, **kwargs):
    return calibrate(start, client_shift, global_shift, *args, **kwargs)


@caught_by("calibrate", "calibration_adds_the_orthogonal_component_of_the_shift")
def calibration_of_the_whole_model(
    start, global_shift, client_shift, granularity="tensor", other_updates=None, **kwargs
):
    return calibrate(start, global_shift, client_shift, "model", other_updates, **kwargs)


@caught_by("calibrate", "pairwise_calibration_projects_the_client_shift")
def calibration_ignores_the_others(
    start, global_shift, client_shift, granularity="tensor", other_updates=None, **kwargs
):
    return calibrate(start, global_shift, client_shift, granularity, **kwargs)


@caught_by("Tangent", "rows_on_a_sphere_are_transported")
class TangentByProjection(Tangent):
    def __call__(self, space, base, current, displacements):
        return super().__call__(space, base, current, displacements, transport=None if space.flat else "projection")


@caught_by("Tangent", "rows_on_a_sphere_are_transported")
class TangentWithoutTransport(Tangent):
    def apply(self, frame, state=None):
        if frame.transporter is not None:
            frame = replace(frame, rows=(*frame.base_displacements.flatten(1), frame.rows[-1]))
        return super().apply(frame, state)


@caught_by("correction_quality", "quality_compares_the_descents_of_the_corrected_and_the_transported_update")
def correction_quality_with_the_sign_of_the_gradient(space, correction, updates, gradient, **options):
    return correction_quality(space, correction, updates, lambda model: -gradient(model), **options)


@caught_by("CorrectionQuality", "quality_is_the_smallest_ratio_over_useful_updates")
class CorrectionQualityOverAllUpdates(CorrectionQuality):
    @property
    def q(self):
        return float((self.corrected / self.transported).max())
