"""Line charts as SVG documents, in the colours of the metrics page, for light and dark screens."""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import shmserve

Series = Mapping[str, Sequence[tuple[float, float]]]  # line name -> (x, value)
Ticks = Sequence[tuple[float, str]]  # place on an axis, text

_PAGE_CSS = Path(shmserve.__file__).parent / "frontends/http/static/page.css"
_PALETTE = 8
_LEFT, _WIDTH, _RIGHT, _HEIGHT = 70, 720, 30, 150  # of a panel, in pixels
_CAPTION, _AXIS = 36, 24  # above and below a panel, in pixels
_LINE, _SWATCH, _LETTER, _APART = 20, 18, 7, 24  # of the legend, in pixels
_NUMBERS = {"x": 8, "y": 6}  # at an axis, at most; half as many at least


def line_chart(
    title: str,
    panels: Mapping[str, Series],
    along: str = "seconds",
    ticks: Ticks | None = None,
    circled: Mapping[str, float] | None = None,
) -> str:
    """Return the SVG document. Panels share the x axis, and have separate scales from 0.

    Args:
        title: heading.
        panels: lines of each panel, by the panel's caption.
        along: caption of the x axis.
        ticks: places and texts on the x axis; None: round numbers.
        circled: by line name, the x of a point to mark.
    """
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    hues = {name: f"c{n % _PALETTE}" for n, name in enumerate(names)}
    end = max((x for s in panels.values() for line in s.values() for x, _ in line), default=0.0)
    end = end or 1.0
    if ticks is None:
        ticks = [(x, text) for x, text in _round_ticks(end, _NUMBERS["x"]) if x <= end]
    legend, top = _legend(hues, 44)
    parts = [_text(_LEFT, 22, title, "title"), *legend]
    for caption, series in panels.items():
        top += _CAPTION
        parts.append(_text(_LEFT, top - 9, caption))
        parts += _panel(series, hues, top, end, ticks, circled or {})
        top += _HEIGHT + _AXIS
    parts.append(_text(_LEFT + _WIDTH / 2, top + 10, along, "middle quiet"))
    width, height = _LEFT + _WIDTH + _RIGHT, top + 22
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    head += f' width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
    ground = '<rect class="card" width="100%" height="100%"/>'
    return "\n".join([head, _style(), ground, *parts, "</svg>", ""])


def _style() -> str:
    """Return the style sheet. Colours are written out, because some viewers of SVG know neither
    variables nor dark screens, and show the light colours."""
    light, dark = _PAGE_CSS.read_text().split("@media", 2)[:2]
    shared = (
        ".middle{text-anchor:middle} .end{text-anchor:end} .title{font-size:14px;font-weight:600}"
        " .line{fill:none;stroke-width:1.75;stroke-linejoin:round} .knee{fill:none;stroke-width:2}"
    )
    at_night = f"@media(prefers-color-scheme:dark){{{_colours(dark)}}}"
    return f"<style>{shared}{_colours(light)}{at_night}</style>"


def _colours(css: str) -> str:
    colours = dict(re.findall(r"--(\w+): (#\w+)", css))
    hues = [f".c{n}{{stroke:{colours[f'c{n}']}}}" for n in range(_PALETTE)]
    return "".join(
        [
            f".card{{fill:{colours['card']}}} text{{fill:{colours['text']}}}"
            f" .quiet{{fill:{colours['quiet']}}} .grid{{stroke:{colours['grid']}}}",
            *hues,
        ]
    )


def _legend(hues: Mapping[str, str], top: int) -> tuple[list[str], int]:
    """Return a swatch and a name for each line, in as many rows as needed, and the bottom of
    the last row."""
    parts, x = [], _LEFT
    for name, hue in hues.items():
        width = _SWATCH + _LETTER * len(name)
        if x > _LEFT and x + width > _LEFT + _WIDTH:
            x, top = _LEFT, top + _LINE
        parts.append(f'<path class="line {hue}" d="M{x} {top - 4}h12"/>')
        parts.append(_text(x + _SWATCH, top, name, "quiet"))
        x += width + _APART
    return parts, top


def _panel(
    series: Series,
    hues: Mapping[str, str],
    top: int,
    end: float,
    ticks: Ticks,
    circled: Mapping[str, float],
) -> list[str]:
    """Return grid, axes and lines of a panel. `end`: x at the right edge."""
    rows = _round_ticks(
        max((v for line in series.values() for _, v in line), default=0.0), _NUMBERS["y"]
    )
    high, bottom = rows[-1][0], top + _HEIGHT

    def place(x: float, value: float) -> str:
        return f"{_LEFT + _WIDTH * x / end:.1f} {bottom - _HEIGHT * value / high:.1f}"

    parts = []
    for value, text in rows:
        y = bottom - _HEIGHT * value / high
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{_WIDTH}"/>')
        parts.append(_text(_LEFT - 8, y + 4, text, "end quiet"))
    parts += [
        _text(_LEFT + _WIDTH * x / end, bottom + 16, text, "middle quiet") for x, text in ticks
    ]
    for name, line in series.items():
        points = " ".join(place(x, value) for x, value in line)
        parts.append(f'<polyline class="line {hues[name]}" points="{points}"/>')
        for x, value in line:
            if x == circled.get(name):
                cx, cy = place(x, value).split()
                parts.append(f'<circle class="knee {hues[name]}" cx="{cx}" cy="{cy}" r="5"/>')
    return parts


def _round_ticks(high: float, numbers: int) -> list[tuple[float, str]]:
    """Return round numbers with equal distances, from 0 to the first that is not below `high`."""
    least = (high or 1.0) / numbers
    power = 10.0 ** math.floor(math.log10(least))
    step = next((f * power for f in (1, 2, 2.5, 5) if f * power >= least), 10 * power)
    count = max(1, math.ceil((high or 1.0) / step - 1e-9))
    return [(n * step, f"{n * step:,.10g}") for n in range(count + 1)]


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>'
