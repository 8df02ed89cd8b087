"""A test that the machine cannot run is reported as skipped, and fails if ``--require`` names its
need."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WANTS_CURL = "tests/e2e/test_guides.py::test_what_a_guide_says_can_be_typed[README.md]"


def without_programs(*options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, WANTS_CURL],
        env=os.environ | {"PATH": "/nonexistent"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_it_is_reported_as_not_run_with_what_would_install_it() -> None:
    status, told = without_programs()
    assert status == 0
    assert "1 skipped" in told
    assert "not run, curl is missing: apt-get install -y curl" in told


def test_it_fails_where_that_is_required() -> None:
    status, told = without_programs("--require=browser,curl")
    assert status == 1
    assert "curl is missing: apt-get install -y curl" in told


def test_a_requirement_that_nobody_knows_is_refused() -> None:
    status, told = without_programs("--require=curl,chrome")
    assert status == 4
    assert "--require: nothing is called chrome" in told
