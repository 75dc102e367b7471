"""Functions that average and merge models, fit curves and simplices to models, and evaluate ensembles."""

from manifoldagg.averaging.average import AverageInfo, average
from manifoldagg.averaging.certificate import Certificate, MergeInfo
from manifoldagg.averaging.ensemble import Ensemble, Score, ensemble
from manifoldagg.averaging.karcher import karcher
from manifoldagg.averaging.lora import AdapterAverageInfo, average_adapters
from manifoldagg.averaging.merge import merge, run_merge
from manifoldagg.averaging.merge_plan import MergePlan, plan_merge
from manifoldagg.averaging.subspace import Subspace, fit_subspace
from manifoldagg.averaging.swa import SWA

__all__ = [
    "SWA",
    "AdapterAverageInfo",
    "AverageInfo",
    "Certificate",
    "Ensemble",
    "MergeInfo",
    "MergePlan",
    "Score",
    "Subspace",
    "average",
    "average_adapters",
    "ensemble",
    "fit_subspace",
    "karcher",
    "merge",
    "plan_merge",
    "run_merge",
]
