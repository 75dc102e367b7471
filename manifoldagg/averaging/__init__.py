"""Averaging: the mean of the models of a run, a subspace fitted to them, and ensembles drawn from it."""

from manifoldagg.averaging.average import AverageInfo, average
from manifoldagg.averaging.ensemble import Ensemble, Score, ensemble
from manifoldagg.averaging.karcher import karcher
from manifoldagg.averaging.lora import AdapterAverageInfo, average_adapters
from manifoldagg.averaging.subspace import Subspace, fit_subspace
from manifoldagg.averaging.swa import SWA

__all__ = [
    "SWA",
    "AdapterAverageInfo",
    "AverageInfo",
    "Ensemble",
    "Score",
    "Subspace",
    "average",
    "average_adapters",
    "ensemble",
    "fit_subspace",
    "karcher",
]
