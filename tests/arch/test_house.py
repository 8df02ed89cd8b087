"""Structure of the code: names, import circles, engines, constructors, contracts between packages.

Deliberate exceptions are listed here with a reason. An exception that no longer applies fails a
test, too.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shmserve"
SOURCES = {
    path.relative_to(PACKAGE): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
    if "_generated" not in path.parts
}
MOST_PARAMETERS = 6
MOST_FILES = 16
MOST_TWICE = 15
OFTEN = {"__init__.py", "__main__.py", "model.py"}

# Names of the package grpcio that parts of shmserve use.
GRPCIO = {
    "frontends": {"RpcError", "StatusCode"},
}

CONSTRUCTORS = {"InferenceRequest"}  # has the parameters of Triton's class of that name


def classes() -> Iterator[ast.ClassDef]:
    for tree in SOURCES.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_no_file_name_stands_more_than_twice() -> None:
    counts = Counter(path.name for path in SOURCES if path.name not in OFTEN)
    assert {name for name, count in counts.items() if count > 2} == set()


def test_no_folder_has_too_many_files() -> None:
    counts = Counter(str(path.parent) for path in SOURCES)
    assert {name for name, count in counts.items() if count > MOST_FILES} == set()


def test_few_file_names_stand_twice() -> None:
    counts = Counter(path.name for path in SOURCES if not path.name.startswith("__"))
    twice = {name for name, count in counts.items() if count > 1}
    assert len(twice) <= MOST_TWICE, sorted(twice)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("shmserve", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    named = {tuple(m.removeprefix("shmserve.") for m in circle) for circle in circles(imports)}
    assert named == set()


def circles(imports: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Return groups of modules that all import each other, directly or not."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        seen: set[str] = set()
        ahead = list(imports[module])
        while ahead:
            if (one := ahead.pop()) not in seen:
                seen.add(one)
                ahead += imports[one]
        reached[module] = seen
    groups = (
        tuple(sorted(m for m in reached[module] if module in reached[m]))
        for module in imports
        if module in reached[module]
    )
    return set(groups)


def test_a_circle_is_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}, "f": {"e"}}
    assert circles(imports) == {("a", "b", "c"), ("d", "e")}


def test_no_folders_import_each_other() -> None:
    """A folder is a layer: code that two folders share belongs to a third folder below both."""
    assert folder_pairs(SOURCES) == set()


def folder_pairs(sources: Mapping[Path, ast.Module]) -> set[tuple[str, str]]:
    """Return each two folders that import from each other, for type checks included."""
    homes = {module_name(path): str(path.parent) for path in sources}
    edges = set()
    for path, tree in sources.items():
        home = str(path.parent)
        for name in imported_names(tree):
            if homes.get(name, home) != home:
                edges.add((home, homes[name]))
    return {(one, other) for one, other in edges if one < other and (other, one) in edges}


def module_name(path: Path) -> str:
    parts = ("shmserve", *path.with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize(
    ("place", "statement", "pair"),
    [
        # From a parent to a folder that knows the parent, for a type alone, and between two
        # folders
        ("core", "from shmserve.core.control.rollout import Rollout", ("core", "core/control")),
        (
            "dispatch",
            "if TYPE_CHECKING:\n    from shmserve.dispatch.calls import call",
            ("dispatch", "dispatch/calls"),
        ),
        (
            "dispatch/pool",
            "import shmserve.dispatch.calls.attempt",
            ("dispatch/calls", "dispatch/pool"),
        ),
    ],
)
def test_folders_that_import_each_other_are_found(
    place: str, statement: str, pair: tuple[str, str]
) -> None:
    spoiled = {**SOURCES, Path(place) / "breach.py": ast.parse(statement)}
    assert folder_pairs(spoiled) == {pair}


def test_grpc_has_one_engine() -> None:
    """The package grpcio gives types to frontends, no server and no client."""
    used: dict[str, set[str]] = {}
    for path, tree in SOURCES.items():
        used.setdefault(path.parts[0], set()).update(grpcio_names(tree))
    assert {part: names for part, names in used.items() if names} == GRPCIO


def grpcio_names(tree: ast.Module) -> set[str]:
    """Return the names of the package grpcio that a module uses."""
    called: set[str] = set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "grpc":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            imported = [alias for alias in node.names if alias.name.split(".")[0] == "grpc"]
            called |= {alias.asname or "grpc" for alias in imported}
            found |= {alias.name.partition(".")[2] for alias in imported} - {""}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id in called else set()
    return found


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import grpc\ngrpc.server(pool)", "server"),
        ("import grpc as library\nlibrary.server(pool)", "server"),
        ("from grpc import server", "server"),
        ("import grpc.aio", "aio"),
        ("from grpc.aio import server", "server"),
    ],
)
def test_a_second_engine_is_found(statement: str, name: str) -> None:
    assert grpcio_names(ast.parse(statement)) == {name}
    assert not any(name in names for names in GRPCIO.values())


def test_no_two_classes_have_one_name() -> None:
    counts = Counter(node.name for node in classes())
    assert {name for name, count in counts.items() if count > 1} == set()


def test_constructors_have_few_parameters() -> None:
    found = set()
    for node in classes():
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                args = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs][1:]
                if len(args) > MOST_PARAMETERS:
                    found.add(node.name)
    assert found == CONSTRUCTORS


def test_docstrings_say_something_themselves() -> None:
    found = {node.name for node in classes() if "See the module" in (ast.get_docstring(node) or "")}
    assert found == set()


# ---------------------------------------------------------------- contracts between packages

PYPROJECT = ROOT / "pyproject.toml"
CONTRACTS = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]
NUMBERS = {contract["name"].partition(" ")[0] for contract in CONTRACTS}
# Contract, package under the contract, and a forbidden import.
BREACHES = (
    ("C1", "shmserve/core", "shmserve.app"),
    ("C2", "shmserve/client", "falcon"),
    ("C3", "shmserve/coordinator", "cupy"),
    ("C4", "shmserve/supervisor", "grpc"),
    ("C5", "shmserve/tensor", "socket"),
    ("C5", "shmserve/core/scheduling", "threading"),  # the folder of Admission
    ("C5", "shmserve/core/scheduling", "time"),
    ("C6", "shmserve/frontends/oip", "shmserve.coordinator"),
    ("C7", "shmserve/frontends/oip", "shmserve.frontends.http.server"),
    ("C8", "shmserve/repository", "shmserve.grps"),
    ("C9", "shmserve/grps/protocol", "socket"),
    ("C10", "shmserve/grps/frontend", "cupy"),
    ("C11", "shmserve/grps/repository", "falcon"),
    ("C12", "shmserve/grps/frontend/http", "grpc"),
    ("C13", "shmserve/executor/loop", "shmserve.executor.process.model_calls"),
    ("C14", "shmserve/repository", "fsspec"),
    ("C15", "shmserve/cluster/policies", "socket"),
    ("C16", "shmserve/coordinator", "ray"),
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the package and of import-linter's settings, to be spoiled."""
    folder = tmp_path_factory.mktemp("house")
    shutil.copy(PYPROJECT, folder)
    shutil.copytree(PACKAGE, folder / "shmserve", ignore=shutil.ignore_patterns("__pycache__"))
    assert broken(folder) == set()
    return folder


def broken(folder: Path) -> set[str]:
    """Return the contracts that the package in a folder breaks."""
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"],
        env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "1000", "NO_COLOR": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = re.findall(r"^(C\d+) .+ (KEPT|BROKEN)", done.stdout, re.MULTILINE)
    assert {name for name, _ in told} == NUMBERS, done.stdout
    found = {name for name, state in told if state == "BROKEN"}
    assert done.returncode == bool(found)
    return found


def test_every_contract_has_a_breach_to_find() -> None:
    assert {name for name, _, _ in BREACHES} == NUMBERS


@pytest.mark.parametrize(("name", "package", "forbidden"), BREACHES)
def test_a_breach_of_a_contract_is_found(
    name: str, package: str, forbidden: str, copy: Path
) -> None:
    breach = copy / package / "breach.py"
    breach.write_text(f"import {forbidden}\n")
    try:
        assert broken(copy) == {name}
    finally:
        breach.unlink()
