"""Tests of the structure of the package: import directions, import costs, exported names, and snippets in documents."""

import ast
import inspect
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

import manifoldagg

PACKAGE = Path(manifoldagg.__file__).parent
ROOT = PACKAGE.parent
BELOW = {"_signals": set(), "errors": set(), "_threads": set()}
BELOW["_validation"] = {"_threads", "errors"}
BELOW["_io"] = {"_threads", "_validation", "errors"}
BELOW["_json_tree"] = set()
BELOW["_compression"] = {"errors"}
BELOW["tensor_file"] = {"_io", "_json_tree", "_threads", "_validation", "errors"}
BELOW["_result_repr"] = {"_validation"}
BASE = {"_io", "_json_tree", "_result_repr", "_threads", "_validation", "errors", "tensor_file"}
BELOW["kernels"] = BASE
BELOW["manifolds"] = {*BASE, "kernels"}
BELOW["curves"] = {*BELOW["manifolds"], "manifolds"}
BELOW["averaging"] = {*BELOW["curves"], "curves"}
BELOW["corrections"] = {*BELOW["curves"], "curves"}
BELOW["routing"] = BASE
BELOW["federated"] = {*BELOW["averaging"], "averaging", "corrections"}
BELOW["wire"] = {"_compression", *BELOW["manifolds"], "manifolds", "federated"}
BELOW["optim"] = {*BELOW["manifolds"], "manifolds", "corrections", "federated"}
BELOW["integrations"] = {*BELOW["federated"], "federated", "wire"}
BELOW["simulation"] = {*BELOW["federated"], "federated", "routing", "wire"}
BELOW["experiments"] = {*BELOW["simulation"], "simulation"}
BELOW["cli"] = {*BELOW["experiments"], "_signals", "experiments", "integrations", "__init__"}
BELOW["__main__"] = {"_signals", "cli"}
BELOW["testing"] = set(BELOW) - {"cli", "experiments"}
FOREIGN = {"flwr": "integrations/flower", "geoopt": "manifolds/geoopt.py", "pandas": "experiments"}
FOREIGN |= {"triton": "kernels/backends/triton.py", "dp_accounting": "integrations/accounting.py"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """Yield every module that a file imports, including imports in functions, with its AST node."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from ((f"{module}.{alias.name}" if module == "manifoldagg" else module, node) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_import_only_lower_layers(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name, _ in imports(path):
        top, _, rest = name.partition(".")
        if top in FOREIGN:
            assert path.is_relative_to(PACKAGE / FOREIGN[top])
        if top == "manifoldagg" and room != "__init__":
            floor = rest.partition(".")[0]
            # The version belongs to the package and not to a subpackage.
            assert floor in {room, "__version__"} | BELOW[room], f"{path}: {room} may not import {floor}"


def test_an_import_of_a_higher_layer_in_a_function_is_detected(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from manifoldagg.federated import Server\n")
    assert [name for name, _ in imports(bad)] == ["manifoldagg.federated"]
    assert "federated" not in BELOW["curves"]


def import_graph(paths):
    """Return the modules that each module imports, by dotted names. Imports in functions count."""
    modules = {dotted(path): path for path in paths}
    graph = {}
    for module, path in modules.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {
                    full if (full := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names
                }
        graph[module] = (imported & modules.keys()) - {module}
    return graph


def test_there_are_no_import_cycles():
    """The top-level package is excluded, because it imports its names at their first use."""
    TopologicalSorter(import_graph([path for path in FILES if path != PACKAGE / "__init__.py"])).prepare()


def test_an_import_cycle_through_a_function_is_detected(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("def f():\n    import b\n")
    (tmp_path / "b.py").write_text("import a\n")
    with pytest.raises(CycleError):
        TopologicalSorter(import_graph([tmp_path / "a.py", tmp_path / "b.py"])).prepare()


def class_names():
    """Return the files that define a class of each name."""
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    return found


def test_only_a_rule_and_its_trainer_share_a_class_name():
    shared = {name: files for name, files in class_names().items() if len(files) > 1}
    for name, files in list(shared.items()):
        if sorted(path.rpartition("/")[0] for path in files) == ["federated/clients", "federated/rules"]:
            del shared[name]
    assert shared == {}


def test_every_module_has_a_docstring():
    for path in FILES:
        first = ast.get_docstring(ast.parse(path.read_text()))
        assert first, f"{path} has no docstring"


def test_importing_the_package_imports_no_heavy_packages_and_emits_no_warnings():
    heavy = [
        "geoopt",
        "flwr",
        "matplotlib",
        "pandas",
        "scipy",
        "sklearn",
        "typer",
        "rich",
        "triton",
        "sympy",
        "networkx",
    ]
    code = "import torch, sys; before = set(sys.modules); from manifoldagg import *; "
    code += f"print(sorted(set({heavy}) & (set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_the_top_level_package_is_lazy_and_lists_all_its_names():
    code = "import sys, manifoldagg; loaded = {name for name in sys.modules if name.startswith('manifoldagg.')}\n"
    code += "assert not loaded and 'torch' not in sys.modules, loaded\n"
    code += "assert {*manifoldagg.__all__, '__version__'} < set(dir(manifoldagg))\n"
    code += "assert 'torch' not in sys.modules\n"
    for name in manifoldagg.__all__:
        code += f"from manifoldagg import {name}; assert manifoldagg.__dict__['{name}'] is {name}\n"
    code += "import pickle; assert pickle.loads(pickle.dumps([Server, fit])) == [Server, fit]"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_for_type_checkers_equal_the_names_at_runtime():
    (guarded,) = (
        node.body
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
    )
    seen = {alias.name: node.module for node in guarded for alias in node.names}
    assert set(seen) == {*manifoldagg._PACKAGES, *manifoldagg.__all__}
    for name, module in seen.items():
        is_package = name in manifoldagg._PACKAGES
        value = import_module(f"{module}.{name}") if is_package else vars(import_module(module))[name]
        assert getattr(manifoldagg, name) is value


def test_subpackages_are_listed_and_imported_at_first_access():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"cli"}
    paths = [*sorted(packages), "errors", "federated.rules"]
    code = "import sys, manifoldagg\n"
    for path in paths:
        name = path.rpartition(".")[2]
        code += f"assert '{name}' in dir(manifoldagg)\n"
        code += f"assert manifoldagg.{name} is sys.modules['manifoldagg.{path}']\n"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(AttributeError, match="has no attribute 'averages'"):
        _ = manifoldagg.averages


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def load(path):
    if path.is_relative_to(PACKAGE / FOREIGN["flwr"]):
        pytest.importorskip("flwr")
    return import_module(dotted(path))


def is_documented(module, name):
    """Return whether a class or function has its own docstring, or another value has a string below its assignment."""
    value = getattr(module, name)
    if (isinstance(value, type) or inspect.isroutine(value)) and value.__name__ == name:
        docstring = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
        # A dataclass without a docstring has its signature as docstring.
        return bool(docstring) and not docstring.startswith(f"{name}(")
    if not hasattr(module, "__path__"):
        return True
    for path in FILES:
        for assignment, below in pairwise(ast.parse(path.read_text()).body):
            targets = getattr(assignment, "targets", [getattr(assignment, "target", None)])
            if any(getattr(target, "id", None) == name for target in targets):
                return isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    return False


PUBLIC_FILES = [path for path in FILES if "._" not in dotted(path)]


@pytest.mark.parametrize("path", PUBLIC_FILES, ids=dotted)
def test_public_modules_have_all_and_document_their_exports(path):
    module = load(path)
    assert hasattr(module, "__all__"), f"{dotted(path)} has no __all__"
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    undocumented = [name for name in module.__all__ if name not in missing and not is_documented(module, name)]
    assert (missing, undocumented) == ([], [])


def homonyms():
    """Return every name that two packages export with different values, with these packages."""
    named = {}
    for path in PUBLIC_FILES:
        if path.name == "__init__.py" or path.stem in ("schedules", "staleness"):
            module = load(path)
            for name in getattr(module, "__all__", ()):
                named.setdefault(name, {})[dotted(path)] = getattr(module, name)
    return {
        name: set(values) for name, values in named.items() if any(a is not b for a, b in pairwise(values.values()))
    }


def test_only_a_rule_and_its_trainer_share_a_name():
    pair = {"manifoldagg.federated.rules", "manifoldagg.federated.clients"}
    assert [name for name, packages in homonyms().items() if packages != pair] == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.stem
)
def test_documents_qualify_names_that_two_packages_share(page):
    found = re.findall(r"^```python\n(.*?)^```|`([^`\n]+)`", page.read_text(), flags=re.M | re.S)
    code = "\n".join(block or span for block, span in found)
    for name in homonyms():
        assert not re.search(rf"(?<!rules\.)(?<!clients\.)\b{name}\b", code), name


CORRECTIONS = [
    *("Frame", "Tangent", "Position", "DelayCompensated", "OrthoDC", "OrthoCorrect", "OrthoGrad", "OrthoPos"),
    *("OrthoStrict", "OrthoDyn", "GradientSurgery", "Pairwise", "AutoThreshold", "rotate_control", "calibrate"),
    "KrylovDC",
]
RULES = [
    *("FedAvg", "FedAdam", "FedAsync", "ASGD", "DCASGD", "FedOrtho", "FedGS", "FedBuff", "AsyncBezier"),
    *("CA2FL", "FADAS", "AsyncFedED", "AsyncCurve", "OrthoFL", "MasFL", "AdaMasFL", "GeneralizedAsyncSGD", "FLOCO"),
    *("DeFedAvg", "HeLoCo", "DelayedNesterov", "RadialDirectional", "AsyncKrylov", "ACE"),
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
    "manifoldagg.optim.Outer",
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
def test_public_names_can_be_imported_and_have_examples(name):
    module, _, attribute = name.rpartition(".")
    value = getattr(__import__(module, fromlist=[attribute]), attribute)
    assert ">>>" in value.__doc__ or name.endswith(("Tangent", "Embedding", "Update", "Payload"))


def sides(diff):
    """Return the code before and the code after a diff block."""
    lines = diff.splitlines()
    return ["\n".join(line[1:] for line in lines if not line.startswith(other)) for other in "+-"]


def snippets():
    """Return each snippet and each side of a diff of the README alone, and the snippets of other pages together."""
    diffs = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    for number, diff in enumerate(diffs):
        for side, code in zip(("before", "after"), sides(diff), strict=True):
            yield pytest.param(code, id=f"README.md-diff-{number}-{side}")
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)
        name = str(page.relative_to(ROOT))
        if name == "README.md":
            yield from (pytest.param(block, id=f"{name}-{number}") for number, block in enumerate(blocks))
        elif blocks:
            yield pytest.param("\n".join(blocks), id=name)


def modules(page):
    """Return the code blocks of a page that define Python files, by file name."""
    return dict(re.findall(r'^```python title="(\w+\.py)"\n(.*?)^```', page.read_text(), flags=re.M | re.S))


MODULES = {name: code for page in sorted((ROOT / "docs").rglob("*.md")) for name, code in modules(page).items()}


@pytest.mark.parametrize("code", list(snippets()))
def test_snippets_of_documents_run(code, tmp_path, monkeypatch):
    if "from flwr" in code:
        pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, content in MODULES.items():
        (tmp_path / name).write_text(content)
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})


def test_readme_calls_aggregate_in_its_first_lines():
    assert "manifoldagg.aggregate(" in "\n".join((ROOT / "README.md").read_text().splitlines()[:20])
