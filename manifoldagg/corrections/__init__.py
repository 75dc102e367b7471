"""Corrections: what takes a stale update to the current model, as algebra on a Gram matrix."""

from manifoldagg.corrections.correction import Correction
from manifoldagg.corrections.delay import Position, Tangent
from manifoldagg.corrections.frame import Frame
from manifoldagg.corrections.orthogonal import OrthoDC

__all__ = ["Correction", "Frame", "OrthoDC", "Position", "Tangent"]
