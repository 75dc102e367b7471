"""Checks of the types and shapes of all calls inside the package during the tests.

At the first call of a function, beartype compiles a check of its annotations. If the annotations contain shapes,
jaxtyping requires that sizes of the same name are equal within a call. `jaxtyping.config.jaxtyping_disable` disables
both checks.
"""

import ast
import functools
import importlib.machinery
import sys
import types
import typing

import beartype
import jaxtyping

NAME = "__checked__"
check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def resolved(annotation, names):
    """Evaluate an annotation. The result is `Any` for a name that is not defined yet, such as the enclosing class."""

    def bears(value: annotation): ...

    try:
        return typing.get_type_hints(bears, names, include_extras=True)["value"]
    except Exception:
        return typing.Any


def has_shape(annotation):
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(has_shape, typing.get_args(annotation)))


def built(function, annotations):
    """Return the function with its checks, and the context in which calls run, or `None` without shapes."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__ = function.__module__
    copy.__qualname__ = function.__qualname__
    copy.__annotations__ = annotations
    shaped = any(map(has_shape, annotations.values()))
    return check(copy), functools.partial(jaxtyping.jaxtyped, "context") if shaped else None


def checked(thing):
    """Add checks to a function, or to the `__init__` of a dataclass."""
    if isinstance(thing, type):
        if "__dataclass_params__" in vars(thing) and thing.__dataclass_params__.init:
            thing.__init__ = checked(thing.__init__)
        return thing
    if not thing.__annotations__:
        return thing
    annotations = {name: resolved(value, thing.__globals__) for name, value in thing.__annotations__.items()}
    made = None

    @functools.wraps(thing)
    def call(*args, **kwargs):
        nonlocal made
        if jaxtyping.config.jaxtyping_disable:
            return thing(*args, **kwargs)
        if made is None:
            made = built(thing, annotations)
        function, context = made
        if context is None:
            return function(*args, **kwargs)
        with context():
            return function(*args, **kwargs)

    return call


class Decorates(ast.NodeTransformer):
    """Add the check as the innermost decorator of functions without `no_type_check`, and the outermost of classes."""

    def visit_FunctionDef(self, node):
        if any(ast.unparse(decorator) == "no_type_check" for decorator in node.decorator_list):
            return node
        self.generic_visit(node)
        node.decorator_list.append(self.name(node))
        return node

    def visit_ClassDef(self, node):
        self.generic_visit(node)
        node.decorator_list.insert(0, self.name(node))
        return node

    def name(self, node):
        return ast.copy_location(ast.Name(NAME, ast.Load()), node)


class Loader(importlib.machinery.SourceFileLoader):
    """A loader that compiles with checks. It ignores Python's bytecode cache, which has no checks."""

    def get_code(self, fullname):
        tree = Decorates().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module):
        setattr(module, NAME, checked)
        super().exec_module(module)


class Finder:
    """A finder of the modules of one package."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != self.package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def install(package):
    sys.meta_path.insert(0, Finder(package))
