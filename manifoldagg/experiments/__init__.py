"""Experiments: data sets, comparisons of methods, tuning, statistics, reports and plots."""

from manifoldagg.experiments.compare import Comparison, compare
from manifoldagg.experiments.datasets import task
from manifoldagg.experiments.gantt import draw_trace
from manifoldagg.experiments.readers import images, read_idx

__all__ = ["Comparison", "compare", "draw_trace", "images", "read_idx", "task"]
