"""Unpack packages that the running Python lacks: ``python tests/gpu_site.py WHEELS SITE``.

For hosts without network whose own Python has CuPy and torch. A wheel in the folder WHEELS is
unpacked into the folder SITE (for PYTHONPATH) if this Python lacks the distribution or has an
older version. Distributions that are as new stay, because they were built together.
"""

import shutil
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from itertools import takewhile
from pathlib import Path


def numbers(version: str) -> tuple[int, ...]:
    """A version's release: ``2.11.0+cu130`` is (2, 11, 0)."""
    parts = ("".join(takewhile(str.isdigit, part)) for part in version.split("+")[0].split("."))
    return tuple(int(part) for part in takewhile(bool, parts))


def lacking(wheels: Path) -> Iterator[Path]:
    """Yield the wheels that this Python needs."""
    for wheel in sorted(wheels.glob("*.whl")):
        name, version, *_ = wheel.name.split("-")
        try:
            if numbers(metadata.version(name)) >= numbers(version):
                continue
        except metadata.PackageNotFoundError:
            pass
        yield wheel


def main() -> None:
    wheels, site = (Path(argument) for argument in sys.argv[1:])
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    chosen = list(lacking(wheels))
    print(f"{site} holds, of {wheels}:", *(wheel.name for wheel in chosen), sep="\n  ")
    for wheel in chosen:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)


if __name__ == "__main__":
    main()
