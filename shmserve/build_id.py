"""Identity of the running code: tells two builds of one version apart, and has all processes run
the same source tree.

`python -m shmserve` and gunicorn import from the working directory. The processes that they start
do not (`-P`), because models lie there, so a source tree is passed on as a variable.
"""

import hashlib
import os
import sys
from collections.abc import MutableMapping
from functools import cache
from importlib import metadata
from pathlib import Path

_DISTRIBUTIONS = ("shmserve", "shmserve-client")
_DIGITS = 12


@cache
def build_id() -> str:
    """Return digits that are equal where the installed files are equal, or "" in a checkout.

    The digits are a digest of what the installer recorded of the files; a running process keeps
    its first answer, also after an upgrade in place.
    """
    here = Path(__file__).parent
    files: list[str] = []
    for name in _DISTRIBUTIONS:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if Path(str(distribution.locate_file("shmserve"))) == here:
            lines = (distribution.read_text("RECORD") or "").splitlines()
            files += (line for line in lines if line.startswith("shmserve/") and ",sha256=" in line)
    text = "\n".join(sorted(files))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS] if files else ""


def pass_on_tree(environ: MutableMapping[str, str]) -> None:
    """Put the source tree first in PYTHONPATH if this code was found in the working directory.
    Idempotent."""
    tree = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    if not sys.flags.safe_path and sys.path[0] == tree and tree not in paths:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [tree, *paths]))
