"""The shape of the project as a test: which way imports point, where libraries may be used, how large files may get.

Everything is read from syntax trees; nothing is imported. ARCHITECTURE.md explains the rules.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {"unikv": set(), "transfer": {"unikv"}, "workers": {"unikv", "transfer"}}
"""Which of our packages each of them may import besides itself."""

MAX_LINES = 450
"""Hard limit of a module; most have less than half of it."""

MODEL_RUNNERS = ("workers/runner_*.py", "workers/hf_*.py", "workers/drafter.py", "workers/model_*.py")

FENCES: dict[str, tuple[str, ...]] = {
    "torch": (
        "unikv/buffers.py",
        "unikv/cold_codec.py",
        "unikv/host_tier.py",
        "unikv/page_copy.py",
        "unikv/pool_mirror.py",
        "workers/rendezvous.py",
        *MODEL_RUNNERS,
    ),
    "transformers": MODEL_RUNNERS,
    "safetensors": MODEL_RUNNERS,
    "gguf": MODEL_RUNNERS,
    "msgpack": ("transfer/wire.py",),
    "zmq": ("transfer/link_zmq.py", "transfer/link_sockets.py", "transfer/link_curve.py"),
    "cupy": ("transfer/copy_cupy.py",),
    "nixl": ("transfer/nixl_agent.py",),
    "pydantic": ("workers/*.py",),
    "yaml": ("workers/*.py",),
    "typer": ("workers/*.py",),
    "rich": ("workers/*.py",),
    "matplotlib": ("workers/report*.py",),
    # Code that runs what it reads: never, not even between our own processes.
    "pickle": (),
    "shelve": (),
    "marshal": (),
    "dill": (),
    "cloudpickle": (),
}
"""Where a library may be imported."""

ENVIRONMENT_READERS = ("workers/config*.py",)

DECIDERS = (
    *("unikv/errors.py", "unikv/ids.py", "unikv/ranges.py", "unikv/layer_spec.py", "unikv/spec_checks.py"),
    *("unikv/layout.py", "unikv/pool_layout.py", "unikv/views.py", "unikv/geometry.py", "unikv/kernel_index.py"),
    *("unikv/slot_ranges.py", "unikv/slots.py", "unikv/page_table.py", "unikv/page_source.py", "unikv/request.py"),
    *("unikv/sizing*.py", "unikv/budget.py", "unikv/speculation.py", "unikv/legacy.py"),
    *("transfer/hello.py", "transfer/cards.py", "transfer/gate*.py", "transfer/match.py", "transfer/lane*.py"),
    *(
        "transfer/plan.py",
        "transfer/program.py",
        "transfer/coverage.py",
        "transfer/pages.py",
        "transfer/copy_checks.py",
    ),
    *("transfer/copy_moves.py", "transfer/messages.py", "transfer/story.py", "transfer/*_session.py"),
)
"""Modules that only decide: tested in microseconds, without a device, a socket or a clock."""

OUTSIDE_WORLD = {
    *("time", "datetime", "random", "secrets", "os", "io", "pathlib", "tempfile", "shutil", "mmap", "ctypes", "signal"),
    *(
        "socket",
        "select",
        "selectors",
        "asyncio",
        "threading",
        "multiprocessing",
        "concurrent",
        "subprocess",
        "logging",
    ),
    *("torch", "transformers", "cupy", "nixl", "zmq", "msgpack", "pydantic", "yaml", "typer", "rich"),
}
"""What a deciding module may not reach, directly or through others of ours."""

OUTSIDE_CALLS = {"open", "print", "input", "exec", "eval", "breakpoint"}


@cache
def sources() -> dict[str, Path]:
    """Every module of the three packages, by dotted name."""
    files = [path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


def relative(module: str) -> str:
    return sources()[module].relative_to(ROOT).as_posix()


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without the branches only type checkers take."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from runtime_nodes(child)


def names_imported(node: ast.AST) -> list[str]:
    """Dotted names an import statement may mean: packages, modules, and names in them that may be modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
        assert node.module is not None
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def imports(module: str, *, runtime: bool = True) -> set[str]:
    """Modules of ours by dotted name, and top-level names of others."""
    nodes = runtime_nodes(tree(module)) if runtime else ast.walk(tree(module))
    names = {name for node in nodes for name in names_imported(node)}
    ours = names & set(sources())
    return ours | {name.partition(".")[0] for name in names if name.partition(".")[0] not in MAY_IMPORT}


def reachable(module: str) -> dict[str, str]:
    """Everything a module imports, directly or not, with the module that imports it."""
    found: dict[str, str] = {}
    todo = [module]
    while todo:
        current = todo.pop()
        for name in imports(current) - set(found):
            found[name] = current
            if name in sources() and name not in MAY_IMPORT:
                todo.append(name)
    return found


def modules_like(patterns: tuple[str, ...]) -> list[str]:
    return sorted(module for module in sources() if any(fnmatch(relative(module), pattern) for pattern in patterns))


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_one_way(package: str) -> None:
    allowed = {package} | MAY_IMPORT[package]
    wrong = [
        f"{relative(module)} imports {name}"
        for module in sources()
        if module.partition(".")[0] == package
        for name in imports(module, runtime=False)
        if name.partition(".")[0] in {*MAY_IMPORT, "scripts", "tests"} - allowed
    ]
    assert not wrong


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: imports(module) & set(sources()) - set(MAY_IMPORT) for module in sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("library", sorted(FENCES))
def test_libraries_stay_behind_their_fences(library: str) -> None:
    allowed = modules_like(FENCES[library])
    assert [relative(m) for m in sources() if library in imports(m, runtime=False) and m not in allowed] == []


def test_only_the_configuration_reads_the_environment() -> None:
    reads = re.compile(r"\b(?:environb?|getenvb?|putenv|unsetenv)\b")
    allowed = modules_like(ENVIRONMENT_READERS)
    wrong = [
        f"{relative(module)}:{node.lineno}"
        for module in sources()
        if module not in allowed
        for node in ast.walk(tree(module))
        if (isinstance(node, ast.Attribute) and reads.fullmatch(node.attr))
        or (isinstance(node, ast.alias) and reads.fullmatch(node.name))
    ]
    assert not wrong


@pytest.mark.parametrize("pattern", DECIDERS)
def test_every_pattern_of_deciding_modules_names_some(pattern: str) -> None:
    assert modules_like((pattern,))


@pytest.mark.parametrize("module", modules_like(DECIDERS))
def test_deciding_modules_reach_nothing_outside(module: str) -> None:
    found = reachable(module)
    assert {name: f"through {found[name]}" for name in found if name in OUTSIDE_WORLD} == {}
    called = [node.func for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]
    assert not {func.id for func in called if isinstance(func, ast.Name)} & OUTSIDE_CALLS


@pytest.mark.parametrize("package", ["unikv", "transfer"])
def test_importing_a_package_does_not_import_torch(package: str) -> None:
    assert "torch" not in reachable(package)


@pytest.mark.parametrize("module", sorted(sources()))
def test_modules_are_short_and_explain_themselves(module: str) -> None:
    source = sources()[module].read_text(encoding="utf-8")
    assert source.count("\n") <= MAX_LINES, f"{relative(module)}: split it, one idea a file"
    assert ast.get_docstring(tree(module)), f"{relative(module)}: say what the module is for"


@pytest.mark.parametrize("script", ["scripts/demo.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111, f"{script} is not executable"
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("command", ["bash scripts/demo.sh", "bash scripts/test.sh"])
def test_the_readme_gives_the_two_commands(command: str) -> None:
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_pages_name_only_files_that_exist(page: str) -> None:
    named = re.findall(r"`((?:unikv|transfer|workers|scripts|tests|constraints)/[\w./*-]*)`", (ROOT / page).read_text())
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


def test_every_test_file_stays_out_of_the_import_path() -> None:
    # tests/transfer as an importable package would shadow the real one.
    assert not list((ROOT / "tests").rglob("__init__.py"))
