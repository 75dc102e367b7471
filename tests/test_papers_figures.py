"""Tests of the figures of the papers: the tables equal the stored runs, and the page states their numbers."""

import importlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guide" / "paper_and_ours.md"


@pytest.fixture(scope="module")
def figures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks" / "papers")
        yield importlib.import_module("figures")


def row(section, label):
    """Return the table row of a figure in the page."""
    lines = PAGE.read_text().partition(f"## {section}")[2].splitlines()
    return next(line for line in lines if line.startswith(f"| {label} |"))


def finals(frame, method):
    return [f"{100 * mean:.1f}" for mean in frame[frame["method"] == method]["mean"]]


def test_tables_of_sweeps_equal_the_stored_runs(figures):
    for name in figures.SWEEPS:
        stored = pd.read_csv(figures.FIGURES / f"{name}.csv")
        pd.testing.assert_frame_equal(stored, figures.sweep(name), check_dtype=False)
        assert (figures.PICTURES / f"{name}.png").stat().st_size


def test_page_states_the_accuracies_of_the_sweeps(figures):
    frame, text = figures.sweep("manifold-figure-4"), row("Manifold", "Figure 4")
    for method in ("AsyncBezier", "FedAsync"):
        first, second, third, last = finals(frame, method)
        assert f"{method} ends at {first}, {second}, {third} and {last} %" in text
    frame, text = figures.sweep("orthofl-figure-5"), row("OrthoFL", "Figure 5")
    orthofl, fedasync = finals(frame, "OrthoFL")[:2], finals(frame, "FedAsync")[:2]
    assert f"it ends at {orthofl[0]} and {orthofl[1]} %, and FedAsync at {fedasync[0]} and {fedasync[1]} %" in text
    means = frame.pivot(index="value", columns="method", values="mean")
    assert (means.loc[[0.01, 0.1]].idxmax(axis=1) == "OrthoFL").all()
    late = means.loc[1:]
    assert (late.max(axis=1) - late.min(axis=1)).max() < 0.02


def test_page_states_figure_10_and_tables_3_and_4_of_orthofl(figures):
    frame, text = figures.sweep("orthofl-figure-10"), row("OrthoFL", "Figure 10")
    for name, words in (("OrthoFL(", "OrthoFL ends at {}, {} and {} %"), ("FedAvg(", "FedAvg at {}, {} and {} %")):
        (method,) = {one for one in frame["method"] if one.startswith(name)}
        assert words.format(*(number.removesuffix(" %") for number in finals(frame, method))) in text.replace(
            " % with 1, 5 and 10 epochs", " %"
        )
    table = figures.server_settings()
    assert sorted(zip(table["rate"], table["exponent"], strict=True)) == [
        *((0.2, 0.5), (0.4, 0.5), (0.6, 0.3), (0.6, 0.5), (0.6, 0.7), (0.8, 0.5))
    ]
    pd.testing.assert_frame_equal(pd.read_csv(figures.FIGURES / "orthofl-table-4.csv"), table)
    low, high = (f"{100 * value:.1f}" for value in (table["mean"].min(), table["mean"].max()))
    assert f"OrthoFL ends at {low} to {high} %" in row("OrthoFL", "Table 4")
    times = pd.read_csv(figures.FIGURES / "orthofl-table-3.csv")
    assert times["model"].to_list() == [*figures.SIZES]
    for value in times["milliseconds"]:
        assert f"{value:.1f} ms" in row("OrthoFL", "Table 3")


def test_calibration_times_are_measured_for_each_size(figures, monkeypatch):
    monkeypatch.setattr(figures, "SIZES", {"small": (40, 2)})
    (measured,) = figures.calibration_times().itertuples()
    assert (measured.model, measured.parameters, measured.tensors) == ("small", 40, 2)
    assert measured.milliseconds > 0


def test_page_states_the_gini_indices(figures):
    frame = figures.fairness()
    gini = frame[frame["index"] == "Gini"].set_index("method")["mean"].map("{:.3f}".format)
    auto = gini["AsyncCorrected(correction=autothreshold)"]
    said = f"{gini['AsyncBezier']} for AsyncBezier, {auto} with an automatic threshold, {gini['FedOrtho']} for FedOrtho"
    assert f"{said}, {gini['FedAsync']} for FedAsync and {gini['FedAvg']} for FedAvg" in row("Manifold", "Figure 3")


@pytest.mark.parametrize(("speed", "least"), [(1.2, 0.88), (10.0, 0.95)])
def test_the_third_term_of_g_is_smallest_for_a_large_probability_of_the_slow_client(figures, speed, least):
    grid = np.linspace(0.02, 0.99, 98)
    values = [figures.stale_term(p, speed) for p in grid]
    assert grid[int(np.argmin(values))] == pytest.approx(least, abs=0.011)


def test_figures_are_drawn(figures, tmp_path):
    for draw in (figures.draw_fairness, figures.draw_stale_terms, figures.draw_time_bounds):
        draw(tmp_path / f"{draw.__name__}.png")
        assert (tmp_path / f"{draw.__name__}.png").stat().st_size
