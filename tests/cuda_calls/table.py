"""The table in the README: CUDA calls of the product, and where each call has run."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from tests import readme_table
from tests.cuda_calls.scan import Site

FILE = Path(__file__).parent / "README.md"
ON = "fake", "stand-in"
_MARK = "<!-- the table, by `python -m tests.cuda_calls table` -->"
_HEAD = ("use", "places by file of shmserve/", "run on the fake", "on the stand-in", "by neither")


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
        grouped[site.name].append((site.file.removeprefix("shmserve/"), ran))
    made = []
    for name, runs in sorted(grouped.items()):
        ran_on = (sum(on in ran for _, ran in runs) for on in ON)
        neither = Counter(file for file, ran in runs if not ran)
        made.append((f"`{name}`", _cell(Counter(f for f, _ in runs)), *ran_on, _cell(neither)))
    readme_table.write(FILE, _MARK, _HEAD, made)


def rows() -> list[Row]:
    """Return the rows of the README's table, by name and file."""
    return [
        Row(name.strip("`"), file, places, _counts(neither).get(file, 0))
        for name, files, _, _, neither in readme_table.rows(FILE, _MARK)
        for file, places in _counts(files).items()
    ]


def _cell(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{file} {count}" for file, count in sorted(counts.items()))


def _counts(cell: str) -> dict[str, int]:
    parts = (part.split(" ") for part in cell.split(", ") if part)
    return {file: int(count) for file, count in parts}
