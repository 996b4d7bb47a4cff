"""What the package promises in its docstrings is complete: every public thing has one, and it names what it raises."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import unikv

ROOT = Path(unikv.__file__).parent
MODULES = sorted(path.name for path in ROOT.glob("*.py") if path.name != "__init__.py")


def public(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Yield public classes, functions and methods with their names."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                        yield f"{node.name}.{inner.name}", inner


def raised(function: ast.FunctionDef) -> set[str]:
    """Return the names of the errors a function raises itself: `raise Error(...)`."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            names.add(node.exc.func.id)
    return {name for name in names if name.endswith("Error")}


@pytest.mark.parametrize("module", MODULES)
def test_public_things_have_docstrings_and_name_what_they_raise(module: str) -> None:
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{module} has no docstring"
    for name, node in public(tree):
        text = ast.get_docstring(node) or ""
        overrides = name.rpartition(".")[2].startswith("__")
        assert text or overrides, f"{module}: {name} has no docstring"
        if isinstance(node, ast.FunctionDef) and module != "testing.py":
            missing = {error for error in raised(node) - {"InternalError"} if error not in text}
            assert not missing, f"{module}: {name} raises {sorted(missing)} and does not say so"


def test_attributes_of_public_dataclasses_are_explained_or_few() -> None:
    """A dataclass with more than three fields says what they are."""
    for module in MODULES:
        tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.dump(d) for d in node.decorator_list):
                fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
                if len(fields) > 3 and not node.name.startswith("_"):
                    text = ast.get_docstring(node) or ""
                    assert "Attributes:" in text, f"{module}: {node.name} does not explain its attributes"


SECTION_ENTRY = re.compile(r"^    ([a-z_]\w*(?:, [a-z_]\w*)*):", re.MULTILINE)
IDENTITIES = {"layer_id": "layer", "group_id": "group", "role": "role", "request_id": "request"}
"""Parameters that name what a docstring speaks of."""
UNITS = re.compile(
    r"(tokens|pages|slots?|blocks|bytes|token|position|heads|layers|size|rank|dim|factor|len|width|per_block)$"
)


def section(text: str, title: str) -> str:
    """Return a section of a docstring, "" where there is none."""
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    return found.group(1) if found else ""


def described(text: str, title: str) -> list[str]:
    """Return the names a section describes."""
    return [name for names in SECTION_ENTRY.findall(section(text, title)) for name in names.split(", ")]


@pytest.mark.parametrize("module", MODULES)
def test_sections_describe_every_argument_and_attribute_and_no_other(module: str) -> None:
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            args = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            text = ast.get_docstring(node) or ""
            wanted = [arg for arg in args if arg not in {"self", "cls"}]
            if section(text, "Args"):
                assert sorted(described(text, "Args")) == sorted(wanted), f"{module}: Args of {node.name}"
        elif isinstance(node, ast.ClassDef):
            names = {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
            names |= {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
            for name in described(ast.get_docstring(node) or "", "Attributes"):
                assert name in names, f"{module}: {node.name} has no attribute {name}"


@pytest.mark.parametrize("module", MODULES)
def test_public_constants_are_explained(module: str) -> None:
    """A run of constants has its docstring behind it."""
    body = ast.parse((ROOT / module).read_text(encoding="utf-8")).body
    unexplained: list[str] = []
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            unexplained += [t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_")]
        else:
            assert not unexplained or isinstance(node, ast.Expr), f"{module}: {unexplained} are not explained"
            unexplained = []
    assert not unexplained


def promised() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield every method of the public classes, inherited ones included, with its name and docstring."""
    for name in unikv.__all__:
        kind = getattr(unikv, name)
        assert inspect.getdoc(kind), f"{name} has no docstring"
        for member, found in inspect.getmembers_static(kind):
            if member.startswith("_") or issubclass(kind, Enum | BaseException):
                continue
            value = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            if inspect.isfunction(value):
                yield f"{name}.{member}", value, inspect.getdoc(value) or ""


PROMISED = list(promised())


def test_the_promise_covers_the_manager_its_views_and_its_requests() -> None:
    names = {name for name, _, _ in PROMISED}
    assert {
        "UnifiedKVCacheManager.get_buffers",
        "UnifiedKVCacheManager.create_request",
        "UnifiedKVCacheManager.from_scalars",
        "KVCacheRequest.page_tables",
        "KVCacheRequest.resume",
        "PoolBudget.slots",
    } <= names
    assert len(names) > 60


@pytest.mark.parametrize(("name", "function", "text"), PROMISED, ids=[name for name, _, _ in PROMISED])
def test_public_methods_name_every_argument_its_unit_and_the_shape_of_arrays(
    name: str, function: Callable[..., Any], text: str
) -> None:
    assert text
    signature = inspect.signature(function)
    for parameter in list(signature.parameters.values())[0 if "from_" in name else 1 :]:
        if parameter.name == "cls":
            continue
        known = parameter.name in IDENTITIES and IDENTITIES[parameter.name] in text
        assert known or re.search(rf"\b{parameter.name}\b", text), f"{name}: says nothing of {parameter.name}"
        if re.match(r"int\b", str(parameter.annotation)) and not known:
            counted = parameter.name.startswith("num_") or "claim_limit" in parameter.name
            assert counted or UNITS.search(parameter.name), f"{name}: what is {parameter.name} counted in?"
    if re.search(r"\bTensor|SlotRow|ndarray", str(signature.return_annotation)):
        assert re.search(r"``\[.*\]``", text), f"{name}: says no shape"


def calls_of_its_own(function: Callable[..., Any], kind: type) -> set[str]:
    """Return the errors raised by a method, and by private methods of its class that it calls."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    errors: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            errors |= raised(node)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            inner = inspect.getattr_static(kind, node.attr, None)
            if inspect.isfunction(inner):
                errors |= calls_of_its_own(inner, kind)
    return errors


@pytest.mark.parametrize("name", ["UnifiedKVCacheManager", "KVCacheRequest"])
def test_public_methods_name_what_private_ones_raise_for_them(name: str) -> None:
    kind = getattr(unikv, name)
    for full, function, text in PROMISED:
        if full.startswith(f"{name}.") and full != "KVCacheRequest.close":  # every state allows that
            missing = {error for error in calls_of_its_own(function, kind) - {"InternalError"} if error not in text}
            assert not missing, f"{full} raises {sorted(missing)} and does not say so"
