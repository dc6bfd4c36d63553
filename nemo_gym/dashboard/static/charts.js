// Two charts, drawn as SVG: lines over time, and bars. Each has a title, a description and the same data as a table.

import { h, newId, s, setAttribute, setText } from "./dom.js";
import { UNKNOWN, clock, minute, short } from "./format.js";

const HEIGHT = 190;
const MARGIN = { top: 10, right: 12, bottom: 22, left: 46 };
const TABLE_ROWS = 60;
const LABEL_HALF = 26;

/** Returns round values from 0 to at least `largest`, about `wanted` of them. */
export function ticks(largest, wanted = 4) {
  if (!(largest > 0)) return [0, 1];
  const raw = largest / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((one) => one * power >= raw) * power;
  const found = [];
  for (let place = 0; place <= Math.ceil(largest / step - 1e-9); place += 1) found.push(Number((place * step).toPrecision(12)));
  return found;
}

function timeTicks(from, to, width) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400];
  const raw = (to - from) / Math.max(2, Math.floor(width / 90));
  const step = steps.find((one) => one >= raw) ?? steps.at(-1);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return { found, label: step < 60 ? clock : minute };
}

class Figure {
  constructor(title, kind) {
    this.title = title;
    this.titleId = newId("chart-title");
    this.svgTitle = s("title", { id: this.titleId }, title);
    this.svgDescription = s("desc", { id: newId("chart-text") });
    this.svg = s(
      "svg",
      { role: "img", class: kind, "aria-labelledby": `${this.titleId} ${this.svgDescription.id}`, height: HEIGHT },
      this.svgTitle,
      this.svgDescription,
    );
    this.plot = s("g");
    this.svg.append(this.plot);
    this.frame = h("div", { class: "plot" }, this.svg);
    this.legend = h("ul", { class: "legend" });
    this.table = h("table", { class: "data" });
    this.scroller = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${title}, as a table` }, this.table);
    this.details = h("details", {}, h("summary", {}, "As a table"), this.scroller);
    this.heading = h("h3", {}, title);
    this.element = h("figure", { class: "card chart" }, h("figcaption", {}, this.heading), this.frame, this.legend, this.details);
    this.details.addEventListener("toggle", () => this.fillTable());
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  get width() {
    return Math.max(this.frame.clientWidth, 120);
  }

  /** Draws the value axis; returns the place of a value. */
  axis(largest) {
    const marks = ticks(largest);
    const bottom = HEIGHT - MARGIN.bottom;
    const y = (value) => bottom - (value / marks.at(-1)) * (bottom - MARGIN.top);
    for (const mark of marks) {
      this.plot.append(
        s("line", { class: mark === 0 ? "base" : "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y(mark), y2: y(mark) }),
        s("text", { class: "tick", x: MARGIN.left - 8, y: y(mark) + 4, "text-anchor": "end" }, mark < 10000 ? String(mark) : short(mark)),
      );
    }
    return y;
  }

  rows(head, body) {
    const heads = h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)));
    const lines = body.map(([first, ...rest]) => h("tr", {}, h("th", { scope: "row" }, first), ...rest.map((text) => h("td", {}, text))));
    this.table.replaceChildren(h("caption", { class: "unseen" }, this.title), h("thead", {}, heads), h("tbody", {}, ...lines));
  }
}

/** Lines over time; where a value is not known, the line has a gap. */
export class LineChart extends Figure {
  /**
   * @param {string} title What is shown.
   * @param {(value: number) => string} format Writes a value.
   */
  constructor(title, format) {
    super(title, "lines");
    this.format = format;
    this.data = { at: [], series: [], from: 0, to: 1 };
    this.cursor = null;
    this.frame.addEventListener("pointermove", (event) => this.point(event));
    this.frame.addEventListener("pointerleave", () => this.unpoint());
  }

  /** Shows `series`, a list of {name, values, color}, at the times `at`, from one time to another. */
  update(data) {
    this.data = data;
    this.draw();
    if (this.details.open) this.fillTable();
  }

  x(at) {
    const { from, to } = this.data;
    return MARGIN.left + ((at - from) / (to - from)) * (this.width - MARGIN.left - MARGIN.right);
  }

  draw() {
    const { at, series, from, to } = this.data;
    const first = Math.max(0, at.findIndex((time) => time >= from) - 1);
    const visible = series.flatMap((one) => one.values.slice(first)).filter((value) => value !== null);
    setAttribute(this.svg, "width", this.width);
    setAttribute(this.svg, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.plot.replaceChildren();
    const y = this.axis(Math.max(...visible, 0));
    const times = timeTicks(from, to, this.width);
    for (const time of times.found.filter((one) => this.x(one) < this.width - LABEL_HALF)) {
      this.plot.append(s("text", { class: "tick", x: this.x(time), y: HEIGHT - 5, "text-anchor": "middle" }, times.label(time)));
    }
    if (!visible.length) {
      this.plot.append(s("text", { class: "empty", x: (this.width + MARGIN.left) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing yet"));
    }
    for (const one of series) this.line(one, first, y);
    this.y = y;
    this.mark();
    this.describe();
  }

  line({ values, color }, first, y) {
    const { at } = this.data;
    const runs = [];
    let run = null;
    for (let place = first; place < at.length; place += 1) {
      if (values[place] === null || values[place] === undefined) {
        run = null;
        continue;
      }
      if (run === null) runs.push((run = []));
      run.push([Math.max(this.x(at[place]), MARGIN.left), y(values[place])]);
    }
    const base = y(0);
    for (const points of runs) {
      const path = points.map(([left, top]) => `${left.toFixed(1)} ${top.toFixed(1)}`).join("L");
      const area = `M${points[0][0].toFixed(1)} ${base}L${path}L${points.at(-1)[0].toFixed(1)} ${base}Z`;
      if (this.data.series.length === 1) this.plot.append(s("path", { class: `area c${color}`, d: area }));
      this.plot.append(s("path", { class: `line c${color}`, d: points.length > 1 ? `M${path}` : `M${path}h0.01` }));
    }
  }

  /** Writes the legend: the latest values, or those under the pointer. */
  describe() {
    const { at, series } = this.data;
    const place = this.cursor ?? at.length - 1;
    const texts = series.map(({ name, values }) => `${name}: ${values[place] === null || values[place] === undefined ? UNKNOWN : this.format(values[place])}`);
    setText(this.svgDescription, at.length ? `At ${clock(at.at(-1))}: ${texts.join("; ")}` : "Nothing yet.");
    setText(this.heading, this.cursor === null ? this.title : `${this.title} at ${clock(at[place])}`);
    while (this.legend.children.length > series.length) this.legend.lastChild.remove();
    series.forEach(({ name, values, color }, index) => {
      if (!this.legend.children[index]) this.legend.append(h("li", {}, h("i", { "aria-hidden": "true" }), h("span", {}), h("b", {})));
      const [key, label, value] = this.legend.children[index].children;
      setAttribute(key, "class", `key c${color}`);
      setText(label, name);
      setText(value, values[place] === null || values[place] === undefined ? UNKNOWN : this.format(values[place]));
    });
  }

  point(event) {
    const { at } = this.data;
    if (!at.length) return;
    const left = event.clientX - this.frame.getBoundingClientRect().left;
    let nearest = 0;
    at.forEach((time, place) => {
      if (Math.abs(this.x(time) - left) < Math.abs(this.x(at[nearest]) - left)) nearest = place;
    });
    this.cursor = nearest;
    this.mark();
    this.describe();
  }

  unpoint() {
    this.cursor = null;
    this.mark();
    this.describe();
  }

  mark() {
    this.marks?.remove();
    if (this.cursor !== null && this.cursor >= this.data.at.length) this.cursor = null;
    if (this.cursor === null) return;
    const left = this.x(this.data.at[this.cursor]);
    this.marks = s("g", {}, s("line", { class: "cursor", x1: left, x2: left, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    for (const { values, color } of this.data.series) {
      const value = values[this.cursor];
      if (value !== null && value !== undefined) this.marks.append(s("circle", { class: `dot c${color}`, cx: left, cy: this.y(value), r: 3.5 }));
    }
    this.svg.append(this.marks);
  }

  fillTable() {
    const { at, series, from } = this.data;
    const shown = at.map((_, place) => place).filter((place) => at[place] >= from);
    const step = Math.max(1, Math.ceil(shown.length / TABLE_ROWS));
    const places = shown.reverse().filter((_, place) => place % step === 0);
    this.rows(
      ["time", ...series.map(({ name }) => name)],
      places.map((place) => [clock(at[place]), ...series.map(({ values }) => (values[place] === null || values[place] === undefined ? UNKNOWN : this.format(values[place])))]),
    );
  }
}

/** Bars, one beside the other. */
export class BarChart extends Figure {
  /**
   * @param {string} title What is shown.
   * @param {string} what What the bars' labels are.
   * @param {(value: number) => string} format Writes a value.
   */
  constructor(title, what, format) {
    super(title, "bars");
    this.what = what;
    this.format = format;
    this.bars = [];
    this.legend.remove();
  }

  /** Shows `bars`, a list of {label, tick, value}; `tick` stands below the bar, `label` in its place elsewhere. */
  update(bars) {
    this.bars = bars;
    this.draw();
    if (this.details.open) this.fillTable();
  }

  draw() {
    setAttribute(this.svg, "width", this.width);
    setAttribute(this.svg, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.plot.replaceChildren();
    const y = this.axis(Math.max(...this.bars.map(({ value }) => value), 0));
    const step = (this.width - MARGIN.left - MARGIN.right) / Math.max(1, this.bars.length);
    const every = Math.ceil(this.bars.length / Math.max(2, Math.floor(this.width / 40)));
    this.bars.forEach(({ label, tick, value }, place) => {
      const left = MARGIN.left + place * step;
      const gap = Math.min(3, step * 0.15);
      this.plot.append(
        s("rect", { class: "bar-mark c0", x: left + gap, width: Math.max(1, step - 2 * gap), y: y(value), height: Math.max(0, y(0) - y(value)), rx: 2 }, s("title", {}, `${label}: ${this.format(value)}`)),
      );
      if ((this.bars.length - 1 - place) % every === 0) this.plot.append(s("text", { class: "tick", x: left + step / 2, y: HEIGHT - 5, "text-anchor": "middle" }, tick));
    });
    const filled = this.bars.filter(({ value }) => value > 0);
    setText(this.svgDescription, filled.length ? filled.map(({ label, value }) => `${label}: ${this.format(value)}`).join("; ") : "Nothing yet.");
  }

  fillTable() {
    this.rows([this.what, "rollouts"], this.bars.map(({ label, value }) => [label, this.format(value)]));
  }
}
