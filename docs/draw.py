"""Draw state machines and tables into the documents from the tables that the code runs on.

`python docs/draw.py` rewrites the drawings; `--check` fails when one is stale.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from shmserve.core.control import lifecycle
from shmserve.core.memory import slots
from shmserve.core.scheduling import stream_flow
from shmserve.protocol.triton_config.field_table import HINTS, NO_EFFECT, SUPPORTED, schema_paths

FOLDER = Path(__file__).parent
_MARGIN, _COLUMN, _TOP, _ROW = 10, 124, 52, 24  # pixels
_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"
     font-family="sans-serif" font-size="13" text-anchor="middle">
  <defs>
    <marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"
            orient="auto">
      <path d="M0 0L10 5L0 10z" fill="#333"/>
    </marker>
  </defs>
  <rect width="{width}" height="{height}" fill="#fff"/>"""


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


def picture(edges: list[tuple[str, str, str]]) -> str:
    """States as columns, each event as an arrow in a row of its own; one that leads back to its
    state is a loop."""
    states = dict.fromkeys([edge[0] for edge in edges] + [edge[2] for edge in edges])
    at = {state: _MARGIN + _COLUMN // 2 + number * _COLUMN for number, state in enumerate(states)}
    width = 2 * _MARGIN + len(states) * _COLUMN
    height = _TOP + len(edges) * _ROW + _MARGIN
    lines = [_HEAD.format(width=width, height=height)]
    for state, x in at.items():
        lines += [
            f'  <path d="M{x} {_TOP - 12}V{height - _MARGIN}" stroke="#d1d5db"/>',
            f'  <rect x="{x - 52}" y="{_TOP - 42}" width="104" height="30" rx="6" fill="#dbeafe"'
            ' stroke="#1d4ed8"/>',
            f'  <text x="{x}" y="{_TOP - 22}" font-weight="bold">{state}</text>',
        ]
    for row, (source, event, target) in enumerate(edges):
        start, end, y = at[source], at[target], _TOP + (row + 1) * _ROW - 6
        path, middle = f"M{start} {y}H{end}", (start + end) // 2
        if source == target:
            path, middle = f"M{start} {y - 10}h18v10h-18", start - 30
        lines += [
            f'  <path d="{path}" fill="none" stroke="#333" marker-end="url(#a)"/>',
            f'  <text x="{middle}" y="{y - 4}" font-size="12">{escape(event)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def config_table() -> str:
    """Return a table of the fields of config.pbtxt: a row for each message with its honoured
    fields, and a row for all fields of one verdict. Parts of a refused field are left out."""
    honoured: dict[str, list[str]] = {}
    verdicts: dict[str, str] = {}
    for path in schema_paths():
        message, _, part = path.partition(".")
        if path in NO_EFFECT:
            verdicts[path] = f"no effect: {NO_EFFECT[path]}"
        elif path in HINTS:
            verdicts[path] = f"refused: {HINTS[path]}"
        elif path in SUPPORTED:
            verdicts.setdefault(message, "honoured")
            if part and not any(other.startswith(f"{path}.") for other in SUPPORTED):
                honoured.setdefault(message, []).append(f"`{part}`")
    for message, parts in honoured.items():
        verdicts[message] += ": " + ", ".join(parts)
    rows: dict[str, list[str]] = {}
    for path, verdict in verdicts.items():
        rows.setdefault(verdict, []).append(f"`{path}`")
    lines = [f"| {', '.join(fields)} | {verdict} |" for verdict, fields in rows.items()]
    return "\n".join(["| field | |", "|---|---|", *lines])


def drawings() -> dict[str, dict[str, str]]:
    """Document -> name of a drawing -> the drawing."""
    return {"model_config.md": {"config": config_table()}}


def pictures() -> dict[str, str]:
    """File -> what is in it."""
    machines = {"slot": slot_edges(), "instance": instance_edges(), "stream": stream_edges()}
    return {f"states-{name}.svg": picture(edges) for name, edges in machines.items()}


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
    fresh = pictures()
    for document, made in drawings().items():
        fresh[document] = drawn((FOLDER / document).read_text(encoding="utf-8"), made)
    stale = False
    for name, text in fresh.items():
        path = FOLDER / name
        stale = stale or not path.exists() or path.read_text(encoding="utf-8") != text
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
