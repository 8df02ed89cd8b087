"""Draw the state machines into docs/ARCHITECTURE.md from the tables that the code runs on.

`python docs/draw.py` rewrites the drawings; `--check` fails when one is stale.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from shmserve.core import lifecycle, slots, streams

DOCUMENT = Path(__file__).with_name("ARCHITECTURE.md")


def slot_edges() -> list[tuple[str, str, str]]:
    return [
        (state.name, event.name.lower().replace("_", " "), target.name)
        for (state, event), target in slots.TRANSITIONS.items()
    ]


def instance_edges() -> list[tuple[str, str, str]]:
    return [
        (state.value, event.value.lower().replace("_", " "), target.value)
        for state, row in lifecycle.TRANSITIONS.items()
        for event, target in row.items()
        if state is not target  # self-loops are said in words
    ]


def stream_edges() -> list[tuple[str, str, str]]:
    return [
        (state.value, event.value.lower(), target.value)
        for state, row in streams.TRANSITIONS.items()
        for event, target in row.items()
        if state is not target
    ]


def mermaid(edges: list[tuple[str, str, str]]) -> str:
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {source} --> {target}: {event}" for source, event, target in edges]
    return "\n".join([*lines, "```"])


def drawn(text: str) -> str:
    """The document with fresh drawings between its markers."""
    drawings = {"slot": slot_edges(), "instance": instance_edges(), "stream": stream_edges()}
    for name, edges in drawings.items():
        pattern = rf"(<!-- drawn: {name} -->\n).*?(<!-- end: {name} -->)"
        text = re.sub(
            pattern, lambda m, e=edges: f"{m[1]}{mermaid(e)}\n{m[2]}", text, flags=re.DOTALL
        )
    return text


def main() -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    fresh = drawn(text)
    if "--check" in sys.argv:
        return 0 if fresh == text else 1
    DOCUMENT.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
