"""Tables that programs write at the end of a README, behind a mark."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def write(file: Path, mark: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Replace the table: `head` names the columns."""
    told, _, _ = file.read_text().partition(mark)
    lines = [head, *rows]
    table = [f"| {' | '.join(map(str, cells))} |\n" for cells in lines]
    table.insert(1, f"|{'---|' * len(head)}\n")
    file.write_text(f"{told}{mark}\n\n{''.join(table)}")


def rows(file: Path, mark: str) -> list[list[str]]:
    """Return the cells of the table's rows, without the names of the columns."""
    _, _, table = file.read_text().partition(mark)
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
