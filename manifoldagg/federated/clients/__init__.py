"""Trainers, which carry out the local training of a client."""

from manifoldagg.federated.clients.asynccurve import AsyncCurve
from manifoldagg.federated.clients.compression import Codec, ErrorFeedback, Int8, TopK
from manifoldagg.federated.clients.curve import Curve
from manifoldagg.federated.clients.floco import FLOCO
from manifoldagg.federated.clients.local import Epochs, Gradient, Local, Proximal
from manifoldagg.federated.clients.lorentzproximal import LorentzProximal
from manifoldagg.federated.clients.masfl import ControlVariate, Normalised
from manifoldagg.federated.clients.orthofl import Calibrated
from manifoldagg.federated.clients.personal import load_personal
from manifoldagg.federated.clients.scheduled import Scheduled
from manifoldagg.federated.clients.trajectory import Trajectory

__all__ = [
    "FLOCO",
    "AsyncCurve",
    "Calibrated",
    "Codec",
    "ControlVariate",
    "Curve",
    "Epochs",
    "ErrorFeedback",
    "Gradient",
    "Int8",
    "Local",
    "LorentzProximal",
    "Normalised",
    "Proximal",
    "Scheduled",
    "TopK",
    "Trajectory",
    "load_personal",
]
