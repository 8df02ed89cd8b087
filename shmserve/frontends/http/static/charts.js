// One card: a title, a plot drawn by uPlot, and a legend with the values under the pointer
// (all plots over time share it) or else the newest ones.

import * as format from "./format.js";

const HEIGHT = 170;
const PALETTE = 8;
const POWERS = Array.from({ length: 51 }, (_, power) => 2 ** power); // steps of an axis of bytes
const TIMES = [5, 10, 20, 60, 300, 600, 1200, 3600, 10800, 21600, 86400, 432000]; // seconds
const WHOLE = Array.from({ length: 46 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));
const style = getComputedStyle(document.documentElement);
const colour = (name) => style.getPropertyValue(name).trim();

/** A point whose neighbours are missing would not be seen as a line: mark it. */
function alone(plot, index) {
  const values = plot.data[index];
  const there = (at) => values[at] !== null && values[at] !== undefined;
  return values.flatMap((_, at) => (there(at) && !there(at - 1) && !there(at + 1) ? [at] : []));
}

export class Chart {
  /** `spec`: title, unit, show (value to text), `whole` for counts; for bars `ticks` (index to
   * text) and `legend` (value and index to text). */
  constructor(parent, spec) {
    this.spec = spec;
    this.labels = [];
    this.plot = null;
    this.card = document.createElement("figure");
    const caption = this.card.appendChild(document.createElement("figcaption"));
    caption.appendChild(document.createElement("h3")).textContent = spec.title;
    caption.appendChild(document.createElement("span")).textContent = spec.unit;
    this.area = this.card.appendChild(document.createElement("div"));
    this.area.className = "plot";
    this.area.setAttribute("role", "img");
    this.legend = this.card.appendChild(document.createElement("ul"));
    this.legend.className = "legend";
    parent.append(this.card);
    this.sizes = new ResizeObserver(() => {
      if (this.plot) this.plot.setSize({ width: this.area.clientWidth, height: HEIGHT });
    });
    this.sizes.observe(this.area);
  }

  /** `lines`: label, values, and perhaps the number of its colour. */
  draw(times, lines, level, span) {
    Object.assign(this, { lines, level, span });
    const labels = lines.map((line) => `${line.colour} ${line.label}`);
    if (!this.plot || labels.join("\n") !== this.labels.join("\n")) {
      this.labels = labels;
      this.build();
    }
    this.plot.setData([times, ...lines.map((line) => line.values)]);
    this.tell();
  }

  /** Draw anew, e.g. in other colours. */
  restyle() {
    if (!this.plot) return;
    const data = this.plot.data;
    this.build();
    this.plot.setData(data);
    this.tell();
  }

  remove() {
    this.sizes.disconnect();
    this.plot?.destroy();
    this.card.remove();
  }

  build() {
    this.plot?.destroy();
    this.plot = new uPlot(this.options(), null, this.area);
    this.values = this.lines.map((line, index) => {
      const item = document.createElement("li");
      const swatch = item.appendChild(document.createElement("i"));
      swatch.style.setProperty("--swatch", `var(--c${this.hue(index)})`);
      const label = item.appendChild(document.createElement("span"));
      label.textContent = label.title = line.label;
      return item.appendChild(document.createElement("b"));
    });
    this.legend.replaceChildren(...this.values.map((value) => value.parentElement));
  }

  hue(index) {
    return (this.lines[index].colour ?? index) % PALETTE;
  }

  options() {
    const { show, ticks, whole } = this.spec;
    const steps = show === format.bytes ? POWERS : whole ? WHOLE : undefined;
    const axis = { stroke: colour("--quiet"), font: "12px system-ui, sans-serif", grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
    const x = ticks
      ? { ...axis, grid: { show: false }, splits: () => [...ticks.keys()], values: (_, at) => at.map((split) => ticks.get(split)) }
      : { ...axis, grid: { show: false }, space: 70, incrs: TIMES, values: (_, at) => at.map((split) => format.moment(split, this.level)) };
    return {
      width: this.area.clientWidth,
      height: HEIGHT,
      padding: [8, 20, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 }, sync: ticks ? undefined : { key: "time" } },
      hooks: { setCursor: [() => this.tell()] },
      scales: {
        x: { time: false, range: () => this.span },
        y: { range: (_, low, high) => [Math.min(0, low ?? 0), this.spec.top?.(high) ?? (high > 0 ? high * 1.1 : 1)] },
      },
      axes: [
        { ...x, size: 26 },
        { ...axis, size: 62, space: 34, ...(steps && { incrs: steps }), values: (_, at) => at.map((split) => (split === 0 ? "0" : show(split))) },
      ],
      series: [{}, ...this.lines.map((_, index) => this.line(index))],
    };
  }

  line(index) {
    const stroke = colour(`--c${this.hue(index)}`);
    if (this.spec.ticks) return { stroke, fill: stroke, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.82, 60] }) };
    const fill = this.lines.length === 1 ? `${stroke}22` : undefined;
    return { stroke, fill, width: 1.75, points: { show: false, size: 4, fill: stroke, filter: alone } };
  }

  /** Bring the legend, and the words for those who do not see the plot, up to date. */
  tell() {
    if (!this.plot) return;
    const at = this.plot.cursor.idx;
    const pointed = at !== null && at !== undefined && this.plot.cursor.left >= 0;
    this.lines.forEach((line, index) => {
      const value = pointed ? line.values[at] : this.spec.ticks ? undefined : line.values.at(-1);
      const text = this.spec.ticks ? this.spec.legend(value, pointed ? at : null) : this.spec.show(value ?? null);
      if (this.values[index].textContent !== text) this.values[index].textContent = text;
    });
    if (pointed) return;
    const words = this.lines.map((line, index) => `${line.label} ${this.values[index].textContent}`);
    this.area.setAttribute("aria-label", `${this.spec.title}, ${this.spec.unit}: ${words.join(", ") || "nothing"}`);
  }
}
