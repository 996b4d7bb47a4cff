"""What the package promises in its docstrings is complete: every public thing has one, and it names what it raises."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
