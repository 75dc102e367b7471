"""Draw figures and tables of three papers.

    python benchmarks/papers/figures.py [--time]

- Manifold, Figures 3 and 4
- OrthoFL, Figures 5 and 10 and Tables 3 and 4
- Queue, Figures 1 and 2

The runs of the sweeps and of Table 4 are the tables of `figures.toml`; their reports are in
`benchmarks/results/papers/figures`. The runs of Figure 3 of Manifold are those of the table `digits` in
`evidence.toml`. The figures of Queue need no runs. The script writes the pictures to `docs/assets/papers`, and the
tables to `benchmarks/results/papers/figures`. With `--time`, it also measures the times of Table 3.
"""

import argparse
import json
import re
import statistics
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from records import RESULTS, ROOT

from manifoldagg._io import new_figure
from manifoldagg.corrections import calibrate
from manifoldagg.experiments.plots import draw_sweep
from manifoldagg.experiments.statistics import mean_ci
from manifoldagg.experiments.sweep import load_sweep
from manifoldagg.routing import TimeBound, UpdateBound, uniform

PICTURES = ROOT / "docs" / "assets" / "papers"
FIGURES = RESULTS / "figures"
SWEEPS = {
    "manifold-figure-4": ("epochs", [f"manifold-epochs-{k}" for k in (1, 2, 5, 10)]),
    "orthofl-figure-5": ("partition.concentration", [f"orthofl-{k}" for k in ("001", "01", "1", "100", "10000")]),
    "orthofl-figure-10": ("epochs", [f"orthofl-epochs-{k}" for k in (1, 5, 10)]),
}
"""The option and the reports of each sweep."""
FAIRNESS = ("AsyncBezier", "AsyncCorrected(correction=autothreshold)", "FedOrtho", "FedAsync", "FedBuff", "FedAvg")
SIZES = {
    "LeNet-5": (44_426, 10),
    "ResNet-18 (1-D)": (118_978, 62),
    "DistilBERT": (753_428, 28),
    "MobileNetV2": (2_351_972, 158),
    "VGG-11": (9_225_610, 18),
}
"""The numbers of trained parameters and of tensors of the models of OrthoFL, Table 3."""
REPETITIONS = 15
LABELS = {"AsyncCorrected(correction=autothreshold)": "AutoThreshold"}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def sweep(name: str) -> pd.DataFrame:
    """Return the data frame of a sweep."""
    option, reports = SWEEPS[name]
    return load_sweep([FIGURES / report for report in reports], option)


def fairness() -> pd.DataFrame:
    """Return the Gini and the Theil index of each method on the digits, with 95 % intervals (Manifold, Figure 3).

    As in the paper, an index is that of the most accurate model of a run.
    """
    methods = json.loads((RESULTS / "digits" / "results.json").read_text())["methods"]
    rows = []
    for method in FAIRNESS:
        for index in ("Gini", "Theil"):
            found = mean_ci([run[index.lower()] for run in methods[method]["runs"]])
            rows.append((method, index, found.value, found.half_width))
    return pd.DataFrame(rows, columns=["method", "index", "mean", "half_width"])


def draw_fairness(path: Path) -> None:
    """Draw the indices as bars."""
    frame = fairness()
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    for i, (index, rows) in enumerate(frame.groupby("index", sort=False)):
        places = np.arange(len(rows)) + 0.4 * i - 0.2
        axes.barh(places, rows["mean"], 0.36, xerr=rows["half_width"], color=COLOURS[i], label=index, capsize=2)
    axes.set_yticks(range(len(FAIRNESS)), [LABELS.get(name, name) for name in FAIRNESS])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("index of the clients' accuracies")
    axes.set_title("Manifold, Figure 3: digits, 30 clients, 95 % intervals", fontsize="medium")
    axes.legend(frameon=False)
    figure.savefig(path)


def server_settings() -> pd.DataFrame:
    """Return the final accuracy of OrthoFL by the rate and the exponent of the server (OrthoFL, Table 4)."""
    frame = load_sweep([FIGURES / report for report in ("orthofl-server", "orthofl-sgd")], "rate")
    rows = []
    for row in frame.itertuples():
        exponent = re.search(r"staleness\.a=([\d.]+)", row.method)
        if row.method.startswith("OrthoFL(") and exponent is not None:
            rows.append((row.value, float(exponent[1]), row.mean, row.high - row.mean))
    return pd.DataFrame(rows, columns=["rate", "exponent", "mean", "half_width"])


def calibration_times() -> pd.DataFrame:
    """Measure the median processor time of a calibration for each size, in milliseconds (OrthoFL, Table 3).

    A model consists of equal random tensors. A calibration computes both shifts and the start model of a client.
    """
    rows = []
    for name, (parameters, tensors) in SIZES.items():
        models = [
            {f"{i}": torch.randn(parameters // tensors) for i in range(tensors)} for _ in ("base", "end", "global")
        ]
        seconds = []
        for _ in range(REPETITIONS):
            started = time.process_time()
            base, end, current = models
            client_shift = {key: end[key] - base[key] for key in base}
            global_shift = {key: current[key] - base[key] for key in base}
            calibrate(end, global_shift, client_shift)
            seconds.append(time.process_time() - started)
        rows.append((name, parameters, tensors, 1000 * statistics.median(seconds)))
    return pd.DataFrame(rows, columns=["model", "parameters", "tensors", "milliseconds"]).round(3)


def stale_term(probability: float, speed: float, *, concurrency: int = 20) -> float:
    r"""Return the third term of G for two clients, divided by $\eta^2 L^2 B$.

    Args:
        probability: the probability of routing a task to the slow client.
        speed: the rate of the fast client. The rate of the slow client is 1.
        concurrency: the number of tasks m.
    """

    def errors(rate: float) -> float:
        bound = UpdateBound(np.array([1.0, speed]), concurrency, rate, 1.0, 1.0, 0.0, num_updates=1)
        return float(bound(np.array([probability, 1 - probability])))

    # Without a gap, G = a η + b η².
    return (errors(2.0) - 2 * errors(1.0)) / 2


def draw_stale_terms(path: Path) -> None:
    """Draw the third term of G by the probability of the slow client (Queue, Figure 1)."""
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    grid = np.linspace(0.02, 0.995, 400)
    for speed, colour in zip((1.2, 2.0, 5.0, 10.0), COLOURS, strict=True):
        values = [stale_term(p, speed) for p in grid]
        axes.semilogy(grid, values, color=colour, label=f"rates 1 : {speed:g}")
        least = int(np.argmin(values))
        axes.plot(grid[least], values[least], "o", color=colour)
    axes.set_xlabel("probability of the slow client")
    axes.set_ylabel("third term of G / $(\\eta^2 L^2 B)$")
    axes.set_title("Queue, Figure 1: two clients, 20 tasks; points: minima", fontsize="medium")
    axes.legend(frameon=False)
    figure.savefig(path)


def draw_time_bounds(path: Path, ratio: float = 0.0029) -> None:
    """Draw H by the number of tasks for three rates (Queue, Figure 2), with L = 1 and A/B = `ratio`."""
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    rates = np.exp(np.arange(1, 51) / 100)
    counts = np.arange(1, 61)
    for rate, colour in zip((0.015, 0.02, 0.03), COLOURS, strict=False):
        bounds = TimeBound(rates, 1, rate, 1.0, 1.0, ratio).over_concurrency(uniform(rates))
        values = np.array([value for (value, _), _ in zip(bounds, counts, strict=False)])
        best = int(counts[values.argmin()])
        axes.plot(counts, values / values.min(), color=colour, label=f"η = {rate:g}, minimum at m = {best}")
        axes.plot(best, 1.0, "o", color=colour)
    axes.set_ylim(0.99, 1.6)
    axes.set_xlabel("number of tasks m")
    axes.set_ylabel("H / minimum of H")
    axes.set_title("Queue, Figure 2: 50 clients, uniform routing", fontsize="medium")
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Write all figures and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="measure the times of OrthoFL's Table 3")
    timed = parser.parse_args().time
    torch.set_num_threads(1)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, (option, _) in SWEEPS.items():
        frame = sweep(name)
        frame.to_csv(FIGURES / f"{name}.csv", index=False, lineterminator="\n")
        draw_sweep(PICTURES / f"{name}.png", frame, option=option, title="digits")
    server_settings().to_csv(FIGURES / "orthofl-table-4.csv", index=False, lineterminator="\n")
    if timed:
        calibration_times().to_csv(FIGURES / "orthofl-table-3.csv", index=False, lineterminator="\n")
    draw_fairness(PICTURES / "manifold-figure-3.png")
    draw_stale_terms(PICTURES / "queue-figure-1.png")
    draw_time_bounds(PICTURES / "queue-figure-2.png")


if __name__ == "__main__":
    main()
