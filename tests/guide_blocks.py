"""Fenced blocks of the documents that people follow, and comments on the blocks.

An HTML comment before a block says how the test treats the block:

    <!-- file: PATH -->             the content of that file
    <!-- keeps running -->          a command that keeps running
    <!-- fails -->                  an example of a failure
    <!-- not run: REASON -->        impossible in a test

A block of `text` after a command is the command's output: of each line, the parts between "…", in
order.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = ("bash", "python")
_BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```([a-z]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """`where`: document and line; `mark`: the comment before the block, or ""; `language`: the
    fence's word."""

    where: str
    mark: str
    language: str
    text: str

    @property
    def file(self) -> str:
        """Return the file whose content the block is, or ""."""
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else ""

    @property
    def not_run(self) -> str:
        """Return the reason why the block is not run, or "" if it is run."""
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run") else ""


def blocks(document: str) -> Iterator[Block]:
    """Yield the blocks of a document, which is named by its path in the repository."""
    text = (ROOT / document).read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(f"{document}:{line}", found[1] or "", found[2], found[3])


def prints(expected: str, output: str) -> list[str]:
    """Return expected lines that are missing in the output or out of order."""
    missing, at = [], 0
    for line in expected.splitlines():
        pattern = ".*?".join(map(re.escape, line.split("…")))
        found = re.compile(pattern, re.DOTALL).search(output, at)
        if found is None:
            missing.append(line)
        else:
            at = found.end()
    return missing
