"""Draw state machines and tables into the documents from the tables that the code runs on.

`python docs/draw.py` rewrites the drawings; `--check` fails when one is stale.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from shmserve.core.control import lifecycle
from shmserve.core.memory import slots
from shmserve.core.scheduling import stream_flow
from shmserve.protocol.triton_config.field_table import HINTS, NO_EFFECT, SUPPORTED, schema_paths

FOLDER = Path(__file__).parent


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
        for state, row in stream_flow.TRANSITIONS.items()
        for event, target in row.items()
        if state is not target
    ]


def mermaid(edges: list[tuple[str, str, str]]) -> str:
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {source} --> {target}: {event}" for source, event, target in edges]
    return "\n".join([*lines, "```"])


def config_table() -> str:
    """Every field of config.pbtxt and what becomes of it; parts of a refused field are left out."""
    lines = ["| field | |", "|---|---|"]
    for path in schema_paths():
        if path in SUPPORTED and any(other.startswith(f"{path}.") for other in SUPPORTED):
            continue  # its parts say it
        if path in SUPPORTED:
            lines.append(f"| `{path}` | honoured |")
        elif path in NO_EFFECT:
            lines.append(f"| `{path}` | no effect: {NO_EFFECT[path]} |")
        elif path in HINTS:
            lines.append(f"| `{path}` | refused: {HINTS[path]} |")
    return "\n".join(lines)


def drawings() -> dict[str, dict[str, str]]:
    """Document -> name of a drawing -> the drawing."""
    machines = {
        "slot": mermaid(slot_edges()),
        "instance": mermaid(instance_edges()),
        "stream": mermaid(stream_edges()),
    }
    return {"ARCHITECTURE.md": machines, "compatibility.md": {"config": config_table()}}


def drawn(text: str, made: dict[str, str]) -> str:
    """The document with fresh drawings between its markers."""
    for name, drawing in made.items():
        pattern = rf"(<!-- drawn: {name} -->\n).*?(<!-- end: {name} -->)"
        text, count = re.subn(
            pattern, lambda m, d=drawing: f"{m[1]}{d}\n{m[2]}", text, flags=re.DOTALL
        )
        assert count == 1, f"there is no place for '{name}'"
    return text


def main() -> int:
    stale = False
    for document, made in drawings().items():
        path = FOLDER / document
        text = path.read_text(encoding="utf-8")
        fresh = drawn(text, made)
        stale = stale or fresh != text
        if "--check" not in sys.argv:
            path.write_text(fresh, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
