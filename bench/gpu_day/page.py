"""The report as one self-contained page: tables, and inline plots as SVG."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

Bar = tuple[str, float, str]  # label, value, text at the bar's end

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em;
  color: #1b1b1f; background: #fff }
table { border-collapse: collapse; width: 100%; margin: 1em 0 }
td, th { text-align: left; vertical-align: top; padding: .3em .6em; border-bottom: 1px solid #ddd }
.pass, .done { color: #12703a } .fail, .failed, .stopped { color: #b3261e; font-weight: 600 }
.not.run { color: #6a6a72 } td.status { white-space: nowrap }
svg { display: block; margin: 1em 0; max-width: 100%; height: auto } svg text { font-size: 12px }
pre { white-space: pre-wrap; background: #f5f5f7; padding: .6em; max-height: 24em; overflow: auto }
@media (prefers-color-scheme: dark) { body { background: #17171a; color: #e6e6ea }
  pre { background: #222227 } td, th { border-color: #3a3a40 } svg text { fill: #e6e6ea }
  .pass, .done { color: #6fcf97 } .fail, .failed, .stopped { color: #ff8a80 }
  .not.run { color: #a0a0a8 } }
"""
_COLOURS = {"pass": "#2e9e5b", "fail": "#d3392f", "not run": "#a9a9b2"}


def html(report: Mapping[str, Any]) -> str:
    """The page."""
    counts, machine = report["counts"], report["machine"]
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    parts = [
        f"<h1>GPU day: {escape(told)}</h1>",
        f"<p>{escape(_about(report))}</p>",
        _shares(counts),
        "<h2>Claims of docs/gpu.md</h2>",
        _claims(report["claims"]),
        "<h2>Measured</h2>",
        *(_plots(report["findings"]) or ["<p>Nothing was timed.</p>"]),
        "<h2>Steps</h2>",
        bars("Seconds of each step", [(s["name"], s["took_s"], f"{s['took_s']:g} s")
                                      for s in report["steps"]]),
        _steps(report["steps"]),
        f"<p>{escape(str(machine))}</p>",
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><title>GPU day</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
    )


def _about(report: Mapping[str, Any]) -> str:
    devices = report["findings"].get("devices", {}).get("devices", [])
    names = ", ".join(device["name"] for device in devices) or "no device"
    when = f"{report['date']} UTC, commit {report['commit'] or 'unknown'}"
    return f"{names}; CUDA: {report['cuda']}; {when}; {report['took_s']:g} s"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; `rows`: cells as HTML."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: object, kind: str = "") -> str:
    mark = f' class="status {escape(kind)}"' if kind else ""
    return f"<td{mark}>{escape(str(text))}</td>"


def _claims(claims: Iterable[Mapping[str, Any]]) -> str:
    rows = (
        [_cell(c["id"]), _cell(c["status"], c["status"]), _cell(c["words"]), _cell(c["number"]),
         _cell(c["reason"])]
        for c in claims
    )  # fmt: skip
    return _table(("", "", "claim", "number", "why"), rows)


def _steps(steps: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for step in steps:
        output = f"<details><summary>output</summary><pre>{escape(step['output'])}</pre></details>"
        about = escape(f"{step['what']}. {step['reason']}")
        cells = [_cell(step["name"]), _cell(step["status"], step["status"]), f"<td>{about}"]
        rows.append([*cells, output if step["output"] else "", "</td>"])
    return _table(("", "", "what"), rows)


# ---------------------------------------------------------------------------------- plots


def _plots(findings: Mapping[str, Any]) -> list[str]:
    parts = {
        name: part
        for step in ("bench", "deaths", "rounds")
        for name, part in findings.get(step, {}).get("parts", {}).items()
    }
    plots = []
    copies = parts.get("copies", {}).get("rows", {})
    rates = [(name, row["gb_per_s"]) for name, row in copies.items()]
    plots.append(bars("Copies of 64 MiB, GB/s", [(n, v, f"{v:g}") for n, v in rates if _is(v)]))
    times = [
        (f"{size}, {place}", row["ms"]["p50"])
        for size, places in parts.get("regions", {}).get("rows", {}).items()
        for place, row in places.items()
        if isinstance(row["ms"], dict)
    ]
    plots.append(bars("Adding 1 on the GPU, median ms", [(n, v, f"{v:g}") for n, v in times]))
    for name, key, title in (
        ("deaths", "back_after_ms", "A client is killed: its memory is back, ms"),
        ("executors", "back_after_ms", "An executor is killed: its memory is back, ms"),
        ("executors", "answers_after_ms", "An executor is killed: the next one answers, ms"),
    ):
        values = parts.get(name, {}).get(key, [])
        numbered = enumerate(values if isinstance(values, list) else [], 1)
        plots.append(bars(title, [(f"death {k}", v, f"{v:g}") for k, v in numbered if _is(v)]))
    return [plot for plot in plots if plot]


def _is(value: object) -> bool:
    return isinstance(value, (int, float))


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Return horizontal bars, or an empty text without rows."""
    if not rows:
        return ""
    most = max(value for _, value, _ in rows) or 1.0
    drawn = []
    for number, (label, value, end) in enumerate(rows):
        y, width = 28 + 22 * number, max(1.0, 420 * value / most)
        drawn.append(
            f'<text x="250" y="{y + 13}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="258" y="{y}" width="{width:.1f}" height="16" rx="2" fill="#4a78c8"/>'
            f'<text x="{264 + width:.1f}" y="{y + 13}">{escape(end)}</text>'
        )
    return _svg(title, 800, 36 + 22 * len(rows), "".join(drawn))


def _shares(counts: Mapping[str, int]) -> str:
    whole, x, drawn = sum(counts.values()) or 1, 0.0, []
    for name, count in counts.items():
        width = 800 * count / whole
        drawn.append(
            f'<rect x="{x:.1f}" y="24" width="{width:.1f}" height="18" fill="{_COLOURS[name]}"/>'
        )
        x += width
    return _svg("Claims that passed, failed, were not run", 800, 48, "".join(drawn))


def _svg(title: str, width: int, height: int, drawn: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(title)}"><text x="0" y="14" font-weight="600" '
        f'fill="currentColor">{escape(title)}</text><g fill="currentColor">{drawn}</g></svg>'
    )
