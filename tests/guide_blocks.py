"""The fenced blocks of the documents that people follow, and what they say of each.

An HTML comment before a block says what is special about it:

    <!-- file: PATH -->             it is the content of that file
    <!-- keeps running -->          the command is left to run
    <!-- fails -->                  it is there to show how something fails
    <!-- not run: REASON -->        it cannot run in a test

A block of `text` behind one that is run is what it prints: of each line, the parts between "…",
in this order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = ("bash", "python")
_BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```([a-z]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """`where`: document and line; `mark`: its comment, or ""; `language`: what the fence says."""

    where: str
    mark: str
    language: str
    text: str

    @property
    def file(self) -> str:
        """The file that it is the content of; "": none."""
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else ""

    @property
    def not_run(self) -> str:
        """Why it is not run; "": it is."""
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run") else ""


def blocks(document: str) -> Iterator[Block]:
    """Of a document, named by its path in the repository, in their order."""
    text = (ROOT / document).read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(f"{document}:{line}", found[1] or "", found[2], found[3])


def prints(expected: str, output: str) -> list[str]:
    """Lines of what should be printed that are not there, or not in this order."""
    missing, at = [], 0
    for line in expected.splitlines():
        pattern = ".*?".join(map(re.escape, line.split("…")))
        found = re.compile(pattern, re.DOTALL).search(output, at)
        if found is None:
            missing.append(line)
        else:
            at = found.end()
    return missing
