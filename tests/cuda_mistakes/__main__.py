"""Make each mistake of the catalogue in a copy of the tree, and report what catches it.

    python -m tests.cuda_mistakes                             # on the fake
    python -m tests.cuda_mistakes --cupy .cupy12              # over the stand-in
    python -m tests.cuda_mistakes --cupy .cupy12 --only wait  # mistakes with "wait" in kind or
    name

The tests of each mistake must first pass without it. Exit status 1 if a mistake was caught neither
in this run nor in the last run of the other kind. After runs of both kinds, the README gets the
table.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import readme_table
from tests.cuda import standin
from tests.cuda_mistakes.catalogue import HEAD, MARK, MISTAKES, README, Mistake

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".cuda-mistakes.json"
COPIED = ("shmserve", "tests", "bench", "workers", "pyproject.toml", "gunicorn.conf.py")
LIMIT_S = 120  # for the tests of one mistake, which may make them hang


@dataclass(frozen=True)
class Place:
    """Where tests run: on the fake, or over the stand-in, which writes findings to a file."""

    name: str
    environment: Mapping[str, str]
    findings: Path | None = None


@contextlib.contextmanager
def copy_of_tree() -> Iterator[Path]:
    """Copy of the tree without the product itself in reach, so changes stay in the copy."""
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", ".cupy*", "build", "results")
                shutil.copytree(source, target, ignore=ignore)
            else:
                shutil.copy(source, target)
        yield Path(folder)


@contextlib.contextmanager
def made(mistake: Mistake, tree: Path) -> Iterator[None]:
    file = tree / mistake.file
    text = file.read_text()
    if text.count(mistake.before) != 1:
        raise ValueError(f"{mistake.file} has not once: {mistake.before!r}")
    file.write_text(text.replace(mistake.before, mistake.after))
    try:
        yield
    finally:
        file.write_text(text)


def caught(place: Place, tree: Path, tests: Sequence[str]) -> str:
    """Return the first failing test, or the stand-in's finding, or ""."""
    if place.findings is not None:
        place.findings.unlink(missing_ok=True)
    files = [f"tests/cuda/test_{name}.py" for name in tests]
    options = ("-n0", "-q", "-x", "-W", "default", "--disable-warnings", "-p", "no:cacheprovider")
    paths = os.pathsep.join([str(tree), *filter(None, [place.environment.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", *options, "-m", "not torch", *files],
            cwd=tree, env={**os.environ, **place.environment, "PYTHONPATH": paths},
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "a test that hangs"
    if failed := re.search(r"(?m)^(?:FAILED|ERROR) \S*/test_(\w+)\.py::(\w+)", done.stdout):
        return f"{failed[1]}: {failed[2]}"
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    if done.returncode:
        raise RuntimeError(f"the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return _finding(place)


def _finding(place: Place) -> str:
    if place.findings is None or not place.findings.exists():
        return ""
    found = re.match(r"\d+ ([^:]*)", place.findings.read_text())
    return f"finding: {found[1]}" if found else ""


def place_of(cupy: Path | None, folder: Path) -> Place:
    if cupy is None:
        return Place("fake", {})
    findings = folder / "findings"
    environment = standin.environment(standin.build(cupy / "standin"), cupy, findings=findings)
    return Place("stand-in", environment, findings)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_mistakes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cupy", type=Path, help="the folder CuPy is installed in")
    parser.add_argument("--only", default="", metavar="WORDS")
    parser.add_argument("--skip-first", action="store_true", help="the tests without any mistake")
    return parser.parse_args()


def main() -> int:
    options = parse()
    chosen = [m for m in MISTAKES if options.only in f"{m.kind} {m.name}"]
    kept: dict[str, dict[str, str]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    with copy_of_tree() as tree:
        place = place_of(options.cupy, tree)
        needed = {name for mistake in chosen for name in mistake.tests}
        for name in () if options.skip_first else sorted(needed):
            if why := caught(place, tree, [name]):
                print(f"{place.name}: without any mistake, {why}", flush=True)
                return 1
        for mistake in chosen:
            with made(mistake, tree):
                by = caught(place, tree, mistake.tests)
            kept.setdefault(mistake.name, {})[place.name] = by
            KEPT.write_text(json.dumps(kept, indent=1))
            print(f"{place.name:8}  {mistake.kind}, {mistake.name}: {by or '-'}", flush=True)
    found = [kept.get(m.name, {}) for m in MISTAKES]
    if all("fake" in one and "stand-in" in one for one in found):
        rows = (
            (m.name, m.kind, m.file.removeprefix("shmserve/"), one["fake"], one["stand-in"])
            for m, one in zip(MISTAKES, found, strict=True)
        )
        readme_table.write(README, MARK, HEAD, rows)
    missed = [m.name for m in chosen if not any(kept[m.name].values())]
    print(f"caught by nothing: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
