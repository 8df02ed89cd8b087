"""Identity of the installed code: tells two builds of one version apart."""

import hashlib
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
