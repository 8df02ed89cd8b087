// One card: a title, a plot, and a legend with the values under the pointer (all plots over time
// share it) or else the newest ones.

import { Plot, hue } from "./plot.js";

const overTime = new Set(); // pointing at one of these charts points at all
let pointed = null; // {chart, x}: x in pixels from the left edge of that chart's plot
let frame = 0;

/** Follow the pointer, at most once a frame. */
function follow(next) {
  const before = pointed;
  pointed = next;
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    const concerned = new Set([before, pointed].flatMap((one) => [...(one?.chart.group ?? [])]));
    for (const chart of concerned) chart.tell();
  });
}

export class Chart {
  /** `spec`: title, unit, show (value to text), perhaps `top` (the axis' end for the largest value),
   * `whole` for counts; for bars `ticks` (index to text) and `legend` (value and index to text). */
  constructor(parent, spec) {
    this.spec = spec;
    this.labels = "";
    this.lines = [];
    this.values = [];
    this.card = parent.appendChild(document.createElement("figure"));
    const caption = this.card.appendChild(document.createElement("figcaption"));
    caption.appendChild(document.createElement("h3")).textContent = spec.title;
    caption.appendChild(document.createElement("span")).textContent = spec.unit;
    this.area = this.card.appendChild(document.createElement("div"));
    this.area.className = "plot";
    this.area.setAttribute("role", "img");
    this.plot = new Plot(this.area, spec);
    this.legend = this.card.appendChild(document.createElement("ul"));
    this.legend.className = "legend";
    this.sizes = new ResizeObserver(([entry]) => this.plot.resize(entry.contentRect.width));
    this.sizes.observe(this.area);
    this.listen();
    this.group = spec.ticks ? new Set() : overTime; // the charts that show the same moment
    this.group.add(this);
  }

  listen() {
    const point = (event) => follow({ chart: this, x: event.clientX - this.area.getBoundingClientRect().left });
    this.area.addEventListener("pointerdown", point);
    this.area.addEventListener("pointermove", point);
    for (const end of ["pointerleave", "pointercancel"]) this.area.addEventListener(end, () => follow(null));
  }

  /** `lines`: label, values, and perhaps the number of its colour. `view`: level, span (first and
   * last time), and `none`: text in the place of lines that never leave 0. */
  draw(times, lines, { level, span, none }) {
    this.lines = lines;
    const empty = !lines.some((line) => line.values.some((value) => value)); // neither null nor 0
    this.area.dataset.none = empty ? none : "";
    const labels = lines.map((line, index) => `${hue(line, index)} ${line.label}`).join("\n");
    if (labels !== this.labels) {
      this.labels = labels;
      this.build();
    }
    if (!this.plot.width) this.plot.resize(this.area.clientWidth); // observed once it is on the screen
    this.plot.draw({ times, lines, level, span });
    this.tell();
  }

  remove() {
    if (pointed?.chart === this) pointed = null;
    this.group.delete(this);
    this.sizes.disconnect();
    this.card.remove();
  }

  build() {
    this.plot.build(this.lines);
    this.values = this.lines.map((line, index) => {
      const item = document.createElement("li");
      item.appendChild(document.createElement("i")).className = hue(line, index);
      const label = item.appendChild(document.createElement("span"));
      label.textContent = label.title = line.label;
      return item.appendChild(document.createElement("b")).appendChild(new Text());
    });
    this.legend.replaceChildren(...this.values.map((value) => value.parentElement.parentElement));
  }

  /** The index under the pointer; null: it points elsewhere. */
  index() {
    if (!pointed?.chart.group.has(this)) return null;
    return pointed.chart.plot.nearest(pointed.x);
  }

  /** Bring crosshair, legend, and the words for those who do not see the plot, up to date. */
  tell() {
    const at = this.index();
    const { ticks, legend, show, title, unit } = this.spec;
    this.plot.point(at);
    this.lines.forEach((line, index) => {
      const value = at !== null ? line.values[at] : line.values.at(-1);
      const text = ticks ? legend(value, at) : show(value ?? null);
      if (this.values[index].data !== text) this.values[index].data = text;
    });
    if (at !== null) return;
    const words = this.lines.map((line, index) => `${line.label} ${this.values[index].data}`);
    this.area.setAttribute("aria-label", `${title}, ${unit}: ${this.area.dataset.none || words.join(", ")}`);
  }
}
