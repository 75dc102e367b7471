"""Docstrings of the public API."""

import importlib
import inspect
import re

import pytest

PACKAGES = [
    "manifoldagg",
    "manifoldagg.averaging",
    "manifoldagg.corrections",
    "manifoldagg.curves",
    "manifoldagg.experiments",
    "manifoldagg.federated",
    "manifoldagg.federated.clients",
    "manifoldagg.federated.rules",
    "manifoldagg.federated.schedules",
    "manifoldagg.federated.server.events",
    "manifoldagg.federated.staleness",
    "manifoldagg.integrations.accounting",
    "manifoldagg.integrations.flower",
    "manifoldagg.integrations.monitoring",
    "manifoldagg.kernels",
    "manifoldagg.manifolds",
    "manifoldagg.optim",
    "manifoldagg.routing",
    "manifoldagg.simulation",
    "manifoldagg.testing",
    "manifoldagg.wire",
]
UNNAMED = {"self", "cls", "args", "kwargs", "iterable"}
"""Parameters that users do not pass by name."""


def public_objects():
    """Yield each public class and function once, with the name under which it is first exported."""
    seen = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            is_documented = inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, Exception))
            if is_documented and id(value) not in seen:
                seen.add(id(value))
                yield pytest.param(value, id=f"{package}.{name}")


def parameters_of(value):
    try:
        return [name for name in inspect.signature(value).parameters if name not in UNNAMED]
    except ValueError:  # `typing.Protocol` and some C classes have no signature.
        return []


def docstrings_of(value):
    """Return the docstring of a function, or those of a class and its base classes."""
    owners = value.__mro__ if inspect.isclass(value) else (value,)
    return "\n".join(filter(None, map(inspect.getdoc, owners)))


def is_described(name, text):
    """Whether a section describes the parameter, or a sentence mentions its name as code."""
    return re.search(rf"^ +\*{{0,2}}{name}:|`{name}[`.=]", text, flags=re.M) is not None


@pytest.mark.parametrize("value", list(public_objects()))
def test_docstring_describes_every_parameter(value):
    missing = [name for name in parameters_of(value) if not is_described(name, docstrings_of(value))]
    assert not missing, f"{value.__module__}.{value.__name__}: no description of {', '.join(missing)}"


@pytest.mark.parametrize("value", [case for case in public_objects() if "federated.rules" in case.id])
def test_page_of_a_rule_describes_every_option(value):
    """The pages show only the docstring of the class itself, so it must not rely on base classes."""
    missing = [name for name in parameters_of(value) if not is_described(name, inspect.getdoc(value) or "")]
    assert not missing, f"{value.__name__}: no description of {', '.join(missing)}"


def test_a_missing_description_is_found():
    def example(first, second):
        """Add two numbers.

        Args:
            first: a number.
        """

    assert [name for name in parameters_of(example) if not is_described(name, docstrings_of(example))] == ["second"]
