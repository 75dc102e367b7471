"""Trainers: what a client does with a model and its data."""

from manifoldagg.federated.trainers.asynccurve import AsyncCurve
from manifoldagg.federated.trainers.curve import Curve
from manifoldagg.federated.trainers.floco import FLOCO
from manifoldagg.federated.trainers.local import Epochs, Gradient, Local, Proximal
from manifoldagg.federated.trainers.lorentzproximal import LorentzProximal
from manifoldagg.federated.trainers.masfl import ControlVariate, Normalised
from manifoldagg.federated.trainers.orthofl import Calibrated
from manifoldagg.federated.trainers.scheduled import Scheduled
from manifoldagg.federated.trainers.trajectory import Trajectory

__all__ = [
    "FLOCO",
    "AsyncCurve",
    "Calibrated",
    "ControlVariate",
    "Curve",
    "Epochs",
    "Gradient",
    "Local",
    "LorentzProximal",
    "Normalised",
    "Proximal",
    "Scheduled",
    "Trajectory",
]
