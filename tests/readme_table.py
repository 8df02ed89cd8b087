"""Tables that programs write at the end of a README, behind a mark."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def write(file: Path, mark: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Replace the table after the mark, up to the end of the file. `head` names the columns."""
    before, _, _ = file.read_text().partition(mark)
    lines = [head, *rows]
    table = [f"| {' | '.join(map(str, cells))} |\n" for cells in lines]
    table.insert(1, f"|{'---|' * len(head)}\n")
    file.write_text(f"{before}{mark}\n\n{''.join(table)}")


def rows(file: Path, mark: str) -> list[list[str]]:
    """Return the cells of the table's rows, without the names of the columns."""
    _, found, table = file.read_text().partition(mark)
    assert found, f"{file.name} has no {mark!r}"
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
