"""The house: which way imports point, what an import costs, and that documents tell the truth."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import manifoldagg

PACKAGE = Path(manifoldagg.__file__).parent
ROOT = PACKAGE.parent
BELOW = {
    "_output": {"errors"},
    "errors": set(),
    "kernels": {"_output", "errors"},
    "manifolds": {"errors", "kernels"},
    "curves": {"_output", "errors", "kernels", "manifolds"},
    "averaging": {"_output", "errors", "kernels", "manifolds", "curves"},
    "corrections": {"errors", "kernels", "manifolds", "curves"},
    "routing": {"_output", "errors"},
    "federated": {"errors", "kernels", "manifolds", "curves", "averaging", "corrections"},
}
BELOW["simulation"] = {*BELOW["federated"], "_output", "federated", "routing"}
BELOW["integrations"] = {*BELOW["federated"], "federated"}
BELOW["cli"] = {*BELOW["simulation"], "simulation", "integrations", "__init__"}
BELOW["testing"] = set(BELOW)
FOREIGN = {"flwr": "integrations/flower.py", "geoopt": "manifolds/geoopt.py", "triton": "kernels/triton.py"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """Every module that a file names in an import, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from ((f"{module}.{alias.name}" if module == "manifoldagg" else module, node) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name, _ in imports(path):
        top, _, rest = name.partition(".")
        if top in FOREIGN:
            assert str(path.relative_to(PACKAGE)) == FOREIGN[top]
        if top == "manifoldagg" and room != "__init__":
            floor = rest.partition(".")[0]
            # The version is a property of the package, not of a room.
            assert floor in {room, "__version__"} | BELOW[room], f"{path}: {room} may not import {floor}"


def test_the_import_rule_catches_an_upward_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from manifoldagg.federated import Server\n")
    assert [name for name, _ in imports(bad)] == ["manifoldagg.federated"]
    assert "federated" not in BELOW["curves"]


def test_every_room_says_what_it_is_for():
    for path in FILES:
        first = ast.get_docstring(ast.parse(path.read_text()))
        assert first, f"{path} has no docstring"


def test_importing_loads_nothing_heavy_and_warns_of_nothing():
    heavy = ["geoopt", "flwr", "matplotlib", "scipy", "sklearn", "typer", "rich", "triton", "sympy", "networkx"]
    code = "import torch, sys; before = set(sys.modules); import manifoldagg; "
    code += f"print(sorted(set({heavy}) & (set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


FOUND = ["averaging", "corrections", "curves", "federated", "kernels", "manifolds", "routing", "simulation", "testing"]


@pytest.mark.parametrize("name", [*FOUND, "rules"])
def test_packages_are_found_by_name_and_load_when_they_are_touched(name):
    home = "manifoldagg.federated.rules" if name == "rules" else f"manifoldagg.{name}"
    code = "import sys, manifoldagg; "
    code += f"print('{name}' in dir(manifoldagg), manifoldagg.{name} is sys.modules['{home}'])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.split(), done.stderr) == (["True", "True"], "")
    with pytest.raises(AttributeError, match="has no attribute 'averages'"):
        _ = manifoldagg.averages


CORRECTIONS = [
    *("Frame", "Tangent", "Position", "DelayCompensated", "OrthoDC", "OrthoCorrect", "OrthoGrad", "OrthoPos"),
    *("OrthoStrict", "OrthoDyn", "GradientSurgery", "Pairwise", "AutoThreshold", "rotate_control", "calibrate"),
]
RULES = [
    *("FedAvg", "FedAdam", "FedAsync", "ASGD", "DCASGD", "FedOrtho", "FedGS", "FedBuff", "AsyncBezier"),
    *("CA2FL", "FADAS", "AsyncFedED", "AsyncCurve", "OrthoFL", "MasFL", "AdaMasFL", "GeneralizedAsyncSGD", "FLOCO"),
    "DeFedAvg",
]
PUBLIC = [
    *(f"manifoldagg.kernels.{name}" for name in ("gram", "combine", "set_backend", "available_backends")),
    *(
        f"manifoldagg.routing.{name}"
        for name in (
            *("ClosedNetwork", "UpdateBound", "TimeBound", "optimise_routing", "optimise_concurrency", "uniform"),
            "balanced",
        )
    ),
    *(f"manifoldagg.{name}" for name in ("ParameterSpace", "Bezier", "fit", "Server", "aggregate")),
    *(f"manifoldagg.corrections.{name}" for name in CORRECTIONS),
    *(f"manifoldagg.federated.{name}" for name in ("Server", "aggregate", "Update", "Payload")),
    *(f"manifoldagg.federated.rules.{name}" for name in RULES),
    *(f"manifoldagg.averaging.{name}" for name in ("SWA", "fit_subspace", "ensemble", "karcher")),
    *(f"manifoldagg.simulation.{name}" for name in ("gini", "theil", "dirichlet_partition")),
    *(
        f"manifoldagg.manifolds.{name}"
        for name in (
            *("Flat", "Sphere", "PoincareBall", "Lorentz", "Stiefel", "Grassmann", "SpecialOrthogonal", "Product"),
            *("SymmetricPositiveDefinite", "from_geoopt", "karcher_mean", "distance", "geodesic", "norm"),
            *("pole_ladder", "schild_ladder"),
        )
    ),
    *(
        f"manifoldagg.curves.{name}"
        for name in ("Embedding", "Bezier", "Tunnel", "Simplex", "fit", "plane", "barrier", "refresh_buffers")
    ),
    "manifoldagg.curves.parameter_at_distance",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_import_as_written_and_are_documented(name):
    module, _, attribute = name.rpartition(".")
    value = getattr(__import__(module, fromlist=[attribute]), attribute)
    assert ">>>" in value.__doc__ or name.endswith(("Tangent", "Embedding", "Update", "Payload"))


def snippets():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)
        if blocks:
            yield pytest.param("\n".join(blocks), id=str(page.relative_to(ROOT)))


@pytest.mark.parametrize("code", list(snippets()))
def test_snippets_run_top_to_bottom(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})


def test_the_front_door_is_in_the_first_lines_of_the_readme():
    assert "manifoldagg.aggregate(" in "\n".join((ROOT / "README.md").read_text().splitlines()[:20])
