"""Documents that must not drift from the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from shmserve.config import Settings

ROOT = Path(__file__).parents[2]


def test_the_readme_lists_every_setting() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = [line.split("|")[1] for line in readme.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert listed == set(Settings.__struct_fields__)


def test_the_state_machines_are_drawn_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, "docs/draw.py", "--check"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, "run: python docs/draw.py"


def test_docstrings_cite_invariants_that_exist() -> None:
    architecture = (ROOT / "docs/ARCHITECTURE.md").read_text()
    defined = set(re.findall(r"\*\*I(\d+)\*\*", architecture))
    for path in (ROOT / "shmserve").rglob("*.py"):
        cited = set(re.findall(r"\bI(\d+)\b", path.read_text()))
        assert cited <= defined, path


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
