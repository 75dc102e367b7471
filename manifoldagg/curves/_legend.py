"""Legends of plots, drawn below the axes so that they do not cover data."""

from typing import Any

__all__ = ["legend_below"]

LABEL_HEIGHT = 0.5
"""The height of the tick labels and the axis label in inches."""


def legend_below(axes: Any, columns: int = 3) -> None:
    """Add a legend below the label of the horizontal axis.

    Args:
        axes: matplotlib axes whose artists have labels.
        columns: the number of columns of the legend.
    """
    from matplotlib.transforms import ScaledTranslation

    below = axes.transAxes + ScaledTranslation(0, -LABEL_HEIGHT, axes.figure.dpi_scale_trans)
    options = {"ncols": columns, "fontsize": "small", "frameon": False, "borderaxespad": 0.0}
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below, **options)
