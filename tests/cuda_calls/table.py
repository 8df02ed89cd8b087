"""The table in the README: CUDA calls of the product, and where each call has run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from tests.cuda_calls.scan import Site

FILE = Path(__file__).parent / "README.md"
ON = "fake", "stand-in"
_BEGIN = "<!-- the table, by `python -m tests.cuda_calls table` -->"
_HEAD = "| use | file of shmserve/ | places | run on the fake | on the stand-in | by neither |\n"
_RULE = "|---|---|---|---|---|---|\n"


class Row(Struct, frozen=True):
    """One name in one file: number of places, and number of places that ran."""

    name: str
    file: str
    places: int
    fake: int
    stand_in: int
    neither: int

    @property
    def tested_by(self) -> str:
        """Return `fake`, `stand-in`, `both`, or `neither` if any place ran on neither."""
        if self.neither:
            return "neither"
        if self.fake and self.stand_in:
            return "both"
        return "fake" if self.fake else "stand-in"


def written(places: Mapping[Site, Sequence[str]]) -> str:
    """Return the README with a new table. `places`: systems on which each place ran."""
    grouped = defaultdict(list)
    for site, ran in places.items():
        grouped[site.name, site.file.removeprefix("shmserve/")].append(ran)
    lines = []
    for (name, file), runs in sorted(grouped.items()):
        fake, stand_in = (sum(on in ran for ran in runs) for on in ON)
        row = Row(name, file, len(runs), fake, stand_in, sum(not ran for ran in runs))
        cells = (f"`{name}`", file, row.places, row.fake, row.stand_in, row.neither or "")
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
    head, _, _ = FILE.read_text().partition(_BEGIN)
    return f"{head}{_BEGIN}\n\n{_HEAD}{_RULE}{''.join(lines)}"


def rows() -> list[Row]:
    """Return the rows of the README's table."""
    _, _, table = FILE.read_text().partition(_BEGIN)
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[2].isdigit():
            numbers = [int(cell or 0) for cell in cells[2:]]
            found.append(Row(cells[0].strip("`"), cells[1], *numbers))
    return found
