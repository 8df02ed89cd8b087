"""Environments for models, made without network: packages are links to packages of the tests."""

import os
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

from shmserve.executor.process import environment_start

# A pack's own program, as conda-pack writes it, with a module beside it
CONDA_UNPACK = """#!/usr/bin/env python
from conda_unpack_progress import progressbar
import os, sys
with open(os.path.join(sys.prefix, "unpacked_at"), "w") as file:
    file.write(sys.prefix)
"""


def environment(place: Path, version: str, *, packages: bool = True, copies: bool = False) -> Path:
    """Make an environment with a module `contradiction` of a version, and with a broken `shmserve`.
    `packages`: with the packages for executors. `copies`: without links to other folders, for
    packs."""
    option = ["--copies"] if copies else []
    subprocess.run(
        [sys.executable, "-I", "-m", "venv", "--without-pip", *option, place], check=True
    )
    site = next(place.glob("lib/python*/site-packages"))
    (site / "contradiction.py").write_text(f"VERSION = {version!r}\n")
    (site / "shmserve").mkdir()
    (site / "shmserve" / "__init__.py").write_text("raise RuntimeError('not the server')\n")
    names = [row[1] for row in environment_start.NEEDED] if packages else []
    for distribution in map(metadata.distribution, names):
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            source = Path(str(distribution.locate_file(top))).resolve()
            if copies:  # a pack of megabytes would take seconds
                (site / "packages.pth").write_text(f"{source.parent}\n")
            elif not (site / top).exists():
                (site / top).symlink_to(source)
    return place


def pack(place: Path, version: str) -> Path:
    """Make the archive `place` of an environment, as conda-pack does."""
    folder = environment(place.parent / f"{place.name}-content", version, copies=True)
    (folder / "bin" / "conda-unpack").write_text(CONDA_UNPACK)
    (folder / "bin" / "conda_unpack_progress.py").write_text("progressbar = None\n")
    with tarfile.open(place, "w:gz", compresslevel=1) as archive:
        for name in os.listdir(folder):
            archive.add(folder / name, name)
    return place


def fake_python(place: Path, script: str) -> Path:
    """Make an environment whose `bin/python` is a shell script."""
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").write_text(f"#!/bin/sh\n{script}\n")
    (place / "bin" / "python").chmod(0o755)
    return place
