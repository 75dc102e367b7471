"""Experiments: data sets, comparisons of methods, tuning, statistics, reports and plots."""

from manifoldagg.experiments.compare import Comparison, compare
from manifoldagg.experiments.datasets import load_dataset
from manifoldagg.experiments.plots import draw_trace
from manifoldagg.experiments.readers import read_idx, read_images

__all__ = ["Comparison", "compare", "draw_trace", "load_dataset", "read_idx", "read_images"]
