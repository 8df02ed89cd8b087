"""Measure which of the product's CUDA calls the tests run, and write the table.

    python -m tests.cuda_calls run fake tests/cuda        # pytest's arguments, as often as wanted
    python -m tests.cuda.standin --cupy .cupy12 python -m tests.cuda_calls run stand-in tests/cuda
    python -m tests.cuda_calls table                          # tests/cuda_calls/README.md

A run uses coverage.py, child processes included, and is added to earlier runs. Source that has
changed since a run counts as not run.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.cuda_calls import table
from tests.cuda_calls.scan import PACKAGE, ROOT, sites

FOLDER = ROOT / ".cuda-calls"


def kept(on: str) -> Path:
    return FOLDER / f"{on}.json"


def digest(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]


def lines_run(on: str) -> dict[str, set[int]]:
    """Return the lines run, by file, for files unchanged since."""
    if not kept(on).exists():
        return {}
    told: dict[str, dict[str, Any]] = json.loads(kept(on).read_text())
    return {f: set(t["lines"]) for f, t in told.items() if t["digest"] == digest(f)}


def run(on: str, arguments: list[str]) -> int:
    """Run pytest and add the lines of the product that it ran."""
    with tempfile.TemporaryDirectory() as folder:
        data, report = f"--data-file={folder}/data", Path(folder) / "report.json"
        coverage = [sys.executable, "-m", "coverage"]
        tests = ["-m", "pytest", "-p", "no:cacheprovider", *arguments]
        status = subprocess.run([*coverage, "run", data, *tests], cwd=ROOT).returncode
        subprocess.run([*coverage, "combine", "--quiet", data, folder], cwd=ROOT, check=True)
        write = [*coverage, "json", "--quiet", data, "--fail-under=0", "-o", str(report)]
        subprocess.run(write, cwd=ROOT, check=True)
        files = json.loads(report.read_text())["files"]
    lines = lines_run(on)
    for file, found in files.items():
        lines[file] = lines.get(file, set()) | set(found["executed_lines"])
    document = {f: {"digest": digest(f), "lines": sorted(n)} for f, n in sorted(lines.items())}
    FOLDER.mkdir(exist_ok=True)
    kept(on).write_text(json.dumps(document))
    return status


def write_table() -> None:
    ran = {on: lines_run(on) for on in table.ON}
    places = {s: [on for on in table.ON if s.line in ran[on].get(s.file, ())] for s in sites()}
    table.write(places)
    print(f"{table.FILE.relative_to(ROOT)}: {len(places)} uses in {PACKAGE.name}")


def main(arguments: list[str]) -> int:
    match arguments:
        case ["run", ("fake" | "stand-in") as on, *rest]:
            return run(on, rest)
        case ["table"]:
            write_table()
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
