"""The table in the README: CUDA calls of the product, and where each call has run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from tests import readme_table
from tests.cuda_calls.scan import Site

FILE = Path(__file__).parent / "README.md"
ON = "fake", "stand-in"
_MARK = "<!-- the table, by `python -m tests.cuda_calls table` -->"
_HEAD = ("use", "file of shmserve/", "places", "run on the fake", "on the stand-in", "by neither")


class Row(Struct, frozen=True):
    """One name in one file: number of places, and number of places that ran nowhere."""

    name: str
    file: str
    places: int
    neither: int


def write(places: Mapping[Site, Sequence[str]]) -> None:
    """Write a new table. `places`: systems on which each place ran."""
    grouped = defaultdict(list)
    for site, ran in places.items():
        grouped[site.name, site.file.removeprefix("shmserve/")].append(ran)
    made = []
    for (name, file), runs in sorted(grouped.items()):
        ran_on = (sum(on in ran for ran in runs) for on in ON)
        made.append((f"`{name}`", file, len(runs), *ran_on, sum(not ran for ran in runs) or ""))
    readme_table.write(FILE, _MARK, _HEAD, made)


def rows() -> list[Row]:
    """Return the rows of the README's table."""
    return [
        Row(name.strip("`"), file, int(places), int(neither or 0))
        for name, file, places, _, _, neither in readme_table.rows(FILE, _MARK)
    ]
