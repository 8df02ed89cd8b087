"""Line charts over time as an SVG: panels, one below the other. Uses the standard library
alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Series = Mapping[str, Sequence[tuple[float, float]]]  # line name -> (seconds, value)

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 720, 150, 70, 30, 45  # of a panel, in pixels
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#7f7f7f", "#e377c2")


def svg(title: str, panels: Mapping[str, Series]) -> str:
    """Return the SVG document. Panels share the time axis, and have separate scales from 0."""
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    colours = {name: _COLOURS[n % len(_COLOURS)] for n, name in enumerate(names)}
    end = max((t for s in panels.values() for line in s.values() for t, _ in line), default=1.0)
    parts, top = [_text(_LEFT, 18, title, 14)], _TOP + 20
    for n, name in enumerate(names):
        parts.append(_text(_LEFT + 100 * n, _TOP + 8, name, 11, colours[name]))
    for label, series in panels.items():
        parts += _panel(label, series, colours, top, end or 1.0)
        top += _HEIGHT + _GAP
    size = f'width="{_LEFT + _WIDTH + 20}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    white = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, white, *parts, "</svg>", ""])


def _panel(
    label: str, series: Series, colours: Mapping[str, str], top: int, end: float
) -> list[str]:
    maximum = max((v for line in series.values() for _, v in line), default=0.0) or 1.0
    bottom = top + _HEIGHT
    parts = [
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none"'
        ' stroke="#999"/>',
        _text(_LEFT, top - 5, label, 11),
        _text(5, top + 10, f"{maximum:.4g}", 11),
        _text(5, bottom, "0", 11),
        _text(_LEFT + _WIDTH - 40, bottom + 15, f"{end:.0f} s", 11),
    ]
    for name, line in series.items():
        points = " ".join(
            f"{_LEFT + _WIDTH * t / end:.1f},{bottom - _HEIGHT * v / maximum:.1f}" for t, v in line
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.5"/>'
        )
    return parts


def _text(x: int, y: int, text: str, size: int, colour: str = "black") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
