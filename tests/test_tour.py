"""Tests of `examples/idea.py` and the notebook `examples/tour.ipynb`: they run and show the stated results."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
NAMES = ["average", "correction", "curve", "frame", "step", "verbs"]


def parts(picture):
    """Return the ids of the elements that matplotlib drew, such as `axes_1`, `text_3` and `line2d_7`."""
    return [name for element in picture.iter() if re.fullmatch(r"[a-zA-Z0-9]+_\d+", name := element.get("id", ""))]


def test_idea_example_draws_the_figures_of_the_site(tmp_path):
    command = [sys.executable, "-W", "error::UserWarning", ROOT / "examples/idea.py", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(":", 1) for line in done.stdout.splitlines()[:5])
    chord, curve = map(float, re.findall(r"\d\.\d+", said["curve"]))
    assert curve < chord / 5
    before, after = map(float, re.findall(r"-?\d\.\d+", said["correction"]))
    assert before < 0 == after
    mean, late = map(float, re.findall(r"\d\.\d+", said["average"]))
    assert mean < late / 2
    for folder in (tmp_path, ROOT / "docs/assets/idea"):
        assert sorted(path.stem for path in folder.iterdir()) == NAMES
    for name in NAMES:
        drawn, kept = (ElementTree.parse(folder / f"{name}.svg") for folder in (tmp_path, ROOT / "docs/assets/idea"))
        # The last digits of coordinates may depend on the machine, but the drawn elements must be equal.
        assert parts(drawn) == parts(kept)


def test_tour_notebook_runs(tmp_path):
    notebook = json.loads((ROOT / "examples/tour.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 5
    script = tmp_path / "tour.py"
    script.write_text("\n\n".join(cells))
    environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore:FigureCanvasAgg", script]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^(\w+) +(\d\.\d+) on average", done.stdout, flags=re.M)
    assert [name for name, _ in shown] == ["FedAsync", "FedOrtho", "AsyncKrylov"]
    assert all(float(value) > 0.5 for _, value in shown)
