// A plot in SVG: axes, a grid, lines or bars, and a crosshair. Colours are the style sheet's, so
// that they follow the system without being drawn anew.

import * as format from "./format.js";
import * as ticks from "./ticks.js";

const HEIGHT = 170;
const EDGE = { top: 8, right: 20, bottom: 26, left: 62 }; // room for the words at the axes
const BASE = HEIGHT - EDGE.bottom;
const APART = { x: 70, y: 34 }; // pixels between two marks, at least
const BAR = { share: 0.82, widest: 60 };
const PALETTE = 8;

/** The class that carries a line's colour. */
export const hue = (line, index) => `c${(line.colour ?? index) % PALETTE}`;

const place = (value) => Math.round(value * 10) / 10;

function append(parent, tag, className) {
  const node = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", tag));
  if (className) node.setAttribute("class", className);
  return node;
}

function set(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** Words at an axis: as many text nodes as there are marks, the old ones used again. */
function write(group, marks) {
  while (group.childElementCount > marks.length) group.lastChild.remove();
  while (group.childElementCount < marks.length) append(group, "text").append("");
  marks.forEach(([x, y, text], index) => {
    const node = group.children[index];
    set(node, "x", place(x));
    set(node, "y", place(y));
    if (node.firstChild.data !== text) node.firstChild.data = text;
  });
}

/** The pieces of a line between its gaps: indices of their ends, and path data without its M. */
function pieces(xs, ys) {
  const found = [];
  for (let at = 0; at < ys.length; at += 1) {
    if (ys[at] === null) continue;
    const from = at;
    let points = `${xs[at]} ${ys[at]}`;
    while (at + 1 < ys.length && ys[at + 1] !== null) {
      at += 1;
      points += `L${xs[at]} ${ys[at]}`;
    }
    found.push({ from, to: at, points });
  }
  return found;
}

export class Plot {
  /** `spec` as in `Chart`. */
  constructor(parent, spec) {
    this.spec = spec;
    this.width = 0; // pixels; nothing can be drawn before it is known
    this.data = null;
    this.at = null;
    this.root = append(parent, "svg", spec.ticks ? "bars" : "lines");
    this.grid = append(this.root, "path", "grid");
    this.rows = append(this.root, "g", "rows");
    this.columns = append(this.root, "g", "marks");
    this.body = append(this.root, "g");
    this.cross = append(this.root, "path", "cross");
    this.moment = append(this.root, "g", "marks moment");
    this.lines = [];
  }

  /** Make room for these lines: one group each. */
  build(lines) {
    this.body.replaceChildren();
    this.lines = lines.map((line, index) => {
      const group = append(this.body, "g", hue(line, index));
      const parts = { area: append(group, "path", "area"), line: append(group, "path", "line") };
      return { ...parts, dots: append(group, "path", "dots"), point: append(group, "circle") };
    });
  }

  resize(width) {
    if (width === this.width) return;
    this.width = width;
    set(this.root, "width", width);
    set(this.root, "height", HEIGHT);
    this.render();
  }

  /** `data`: times, lines (label, values), level and span (first and last time). */
  draw(data) {
    this.data = data;
    this.render();
  }

  /** The index nearest to a point `x` pixels from the left edge. */
  nearest(x) {
    const { times, span } = this.data;
    const share = (x - EDGE.left) / this.inner;
    const wanted = span[0] + share * (span[1] - span[0]);
    const distance = (at) => Math.abs(times[at] - wanted);
    return times.reduce((best, _, at) => (distance(at) < distance(best) ? at : best), 0);
  }

  get inner() {
    return Math.max(1, this.width - EDGE.left - EDGE.right);
  }

  render() {
    if (!this.width || !this.data) return;
    const { times, lines, span } = this.data;
    const [low, high] = this.range(lines);
    const y = (value) => place(BASE - ((value - low) / (high - low)) * (BASE - EDGE.top));
    const x = (time) => place(EDGE.left + ((time - span[0]) / (span[1] - span[0])) * this.inner);
    this.xs = times.map(x);
    this.ys = lines.map((line) => line.values.map((value) => (Number.isFinite(value) ? y(value) : null)));
    this.axes(low, high, x, y);
    if (this.spec.ticks) this.bars(x(1) - x(0), y(0));
    else this.trace(y(0));
    this.point(this.at);
  }

  range(lines) {
    let low = 0;
    let high = 0;
    for (const line of lines) {
      for (const value of line.values) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    return [low, this.spec.top?.(high) ?? (high > 0 ? high * 1.1 : 1)];
  }

  axes(low, high, x, y) {
    const { show, ticks: given, whole } = this.spec;
    const step = show === format.bytes ? ticks.binary : whole ? ticks.whole : ticks.decimal;
    const least = (high - low) * (APART.y / (BASE - EDGE.top));
    const values = ticks.marks(low, high, least, step);
    const end = EDGE.left + this.inner;
    set(this.grid, "d", values.map((value) => `M${EDGE.left} ${Math.round(y(value))}H${end}`).join(""));
    write(this.rows, values.map((value) => [EDGE.left - 6, y(value) + 4, format.mark(value, show)]));
    const { span, level } = this.data;
    const room = (span[1] - span[0]) * (APART.x / this.inner);
    const marks = given ?? ticks.moments(...span, room).map((time) => [time, format.moment(time, level)]);
    this.marked = Array.from(marks, ([at]) => x(at));
    write(this.columns, Array.from(marks, ([, text], index) => [this.marked[index], BASE + 18, text]));
  }

  trace(base) {
    const ground = ({ from, to, points }) => `M${this.xs[from]} ${base}L${points}L${this.xs[to]} ${base}Z`;
    this.lines.forEach((parts, index) => {
      const found = pieces(this.xs, this.ys[index]);
      const [alone, long] = [true, false].map((one) => found.filter(({ from, to }) => (from === to) === one));
      set(parts.line, "d", long.map(({ points }) => `M${points}`).join(""));
      set(parts.dots, "d", alone.map(({ points }) => `M${points}h0`).join(""));
      set(parts.area, "d", this.lines.length === 1 ? long.map(ground).join("") : "");
    });
  }

  bars(apart, base) {
    this.bar = Math.min(BAR.widest, apart * BAR.share);
    this.lines.forEach((parts, index) => {
      const bar = (top, at) => `M${place(this.xs[at] - this.bar / 2)} ${base}V${top}h${place(this.bar)}V${base}Z`;
      set(parts.area, "d", this.ys[index].map(bar).join(""));
    });
  }

  /** Mark the values of an index; of none: null. */
  point(at) {
    this.at = at;
    const x = at === null ? undefined : this.xs?.[at];
    this.root.classList.toggle("pointed", x !== undefined);
    if (x === undefined) return;
    if (this.spec.ticks) {
      set(this.cross, "d", `M${place(x - this.bar / 2)} ${EDGE.top}h${place(this.bar)}V${BASE}h${place(-this.bar)}Z`);
      return;
    }
    set(this.cross, "d", `M${Math.round(x)} ${EDGE.top}V${BASE}`);
    write(this.moment, [[x, BASE + 18, format.moment(this.data.times[at], this.data.level)]]);
    this.marked.forEach((other, index) => {
      this.columns.children[index].classList.toggle("near", Math.abs(other - x) < APART.x - 8);
    });
    this.lines.forEach(({ point }, index) => {
      const y = this.ys[index][at];
      set(point, "r", y === null ? 0 : 3);
      if (y === null) return;
      set(point, "cx", x);
      set(point, "cy", y);
    });
  }
}
