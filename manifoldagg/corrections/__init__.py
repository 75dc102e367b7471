"""Corrections of stale updates in asynchronous federated learning.

An update is stale if the server changed its model while the client trained. This change of the server's model is called
the drift. A correction adapts a stale update to the drift before the server adds the update to its model. Most
corrections need only the inner products of the update and the drift.
"""

from manifoldagg.corrections.automatic import AutoThreshold
from manifoldagg.corrections.calibration import calibrate
from manifoldagg.corrections.correction import Composition, Corrected, Correction
from manifoldagg.corrections.delay import DelayCompensated, Position, Tangent
from manifoldagg.corrections.dynamic import OrthoDyn
from manifoldagg.corrections.frame import Frame
from manifoldagg.corrections.gram import Gram
from manifoldagg.corrections.krylov import KrylovDC
from manifoldagg.corrections.orthogonal import OrthoCorrect, OrthoDC, OrthoGrad, OrthoPos, OrthoStrict
from manifoldagg.corrections.quality import CorrectionQuality, correction_quality
from manifoldagg.corrections.rotation import rotate_control
from manifoldagg.corrections.surgery import GradientSurgery, Pairwise
from manifoldagg.corrections.transport import Transport

__all__ = [
    "AutoThreshold",
    "Composition",
    "Corrected",
    "Correction",
    "CorrectionQuality",
    "DelayCompensated",
    "Frame",
    "GradientSurgery",
    "Gram",
    "KrylovDC",
    "OrthoCorrect",
    "OrthoDC",
    "OrthoDyn",
    "OrthoGrad",
    "OrthoPos",
    "OrthoStrict",
    "Pairwise",
    "Position",
    "Tangent",
    "Transport",
    "calibrate",
    "correction_quality",
    "rotate_control",
]
