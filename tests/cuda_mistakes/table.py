"""The table in the README: mistakes and the tests that caught them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

FILE = Path(__file__).parent / "README.md"
_BEGIN = "<!-- the table, by `make cuda-mistakes` -->"
_HEAD = "| mistake | kind | in | caught on the fake by | caught over the stand-in by |\n"
_RULE = "|---|---|---|---|---|\n"


class Row(Struct, frozen=True):
    """`fake`, `stand_in`: failed test or finding there, or ""."""

    name: str
    kind: str
    file: str
    fake: str
    stand_in: str


def write(rows: Iterable[Row]) -> None:
    lines = (f"| {r.name} | {r.kind} | {r.file} | {r.fake} | {r.stand_in} |\n" for r in rows)
    head, _, _ = FILE.read_text().partition(_BEGIN)
    FILE.write_text(f"{head}{_BEGIN}\n\n{_HEAD}{_RULE}{''.join(lines)}")


def rows() -> list[Row]:
    _, _, table = FILE.read_text().partition(_BEGIN)
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [Row(*(cell.strip() for cell in line[1:-1].split("|"))) for line in lines]
