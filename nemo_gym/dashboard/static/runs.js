// Collections of rollouts: how far they are, what came out, and how fast.

import { BarChart, LineChart } from "./charts.js";
import { Keyed, h, setAttribute, setText } from "./dom.js";
import { clock, count, duration, number, reward, short } from "./format.js";

const RATE_OVER_S = 10;
const STATES = {
  running: ["running", "going"],
  completed: ["completed", "good"],
  interrupted: ["interrupted", "warning"],
  failed: ["could not go on", "error"],
};

/** Returns rollouts per second at each point of a run's history. */
export function rates(history) {
  return history.map(([at, done, failed], place) => {
    let before = place - 1;
    while (before > 0 && at - history[before][0] < RATE_OVER_S) before -= 1;
    if (before < 0 || at <= history[before][0]) return null;
    return (done + failed - history[before][1] - history[before][2]) / (at - history[before][0]);
  });
}

/** Returns the bars of a reward histogram: below the first bound, between each two, and from the last one on. */
export function rewardBars(bounds, counts) {
  const text = (bound) => String(Number(bound.toPrecision(6)));
  const bars = counts.map((value, place) => {
    if (place === 0) return { label: `below ${text(bounds[0])}`, tick: `<${text(bounds[0])}`, value };
    if (place === bounds.length) return { label: `${text(bounds[place - 1])} or more`, tick: `≥${text(bounds[place - 1])}`, value };
    return { label: `${text(bounds[place - 1])} to below ${text(bounds[place])}`, tick: text(bounds[place - 1]), value };
  });
  return bars.length && bars[0].value === 0 ? bars.slice(1) : bars;
}

class RunView {
  constructor(run) {
    this.title = h("h3", {});
    this.state = h("span", { class: "pill" });
    this.when = h("p", { class: "muted" });
    this.parts = { done: h("i", { class: "done" }), failed: h("i", { class: "failed" }), running: h("i", { class: "running" }) };
    this.progress = h("div", { class: "progress", role: "progressbar", "aria-label": "Rollouts ended", "aria-valuemin": 0, "aria-valuemax": 100 }, ...Object.values(this.parts));
    this.figures = h("dl", { class: "figures" });
    this.list = new Keyed(this.figures, () => new FigureView());
    this.charts = {
      ended: new LineChart("Rollouts ended", short),
      rate: new LineChart("Rollouts per second", number),
      reward: new LineChart("Mean reward so far", reward),
      rewards: new BarChart("Distribution of rewards", "reward", short),
    };
    const charts = h("div", { class: "charts" }, ...Object.values(this.charts).map(({ element }) => element));
    this.details = h("details", { open: run.finished === null }, h("summary", {}, "Over time, and rewards"), charts);
    this.element = h(
      "article",
      { class: "card run" },
      h("div", { class: "bar" }, this.title, this.state),
      this.when,
      this.progress,
      this.figures,
      this.details,
    );
    this.details.addEventListener("toggle", () => this.draw());
  }

  update(run) {
    this.run = run;
    const going = run.finished === null;
    const ended = run.already_done + run.done + run.failed;
    const [word, level] = STATES[going ? "running" : run.finished] ?? [run.finished, "warning"];
    setText(this.title, run.agent || "Agents named by the rows");
    setText(this.state, word);
    setAttribute(this.state, "data-level", level);
    setText(this.when, `${run.output}, since ${clock(run.started_at)}${going ? "" : `, until ${clock(run.updated_at)}`}`);
    const part = (value) => `${run.total ? (100 * value) / run.total : 0}%`;
    this.parts.done.style.width = part(run.already_done + run.done);
    this.parts.failed.style.width = part(run.failed);
    this.parts.running.style.width = part(run.running);
    setAttribute(this.progress, "aria-valuenow", run.total ? Math.floor((100 * ended) / run.total) : 0);
    setAttribute(this.progress, "aria-valuetext", `${count(ended)} of ${count(run.total)}`);
    this.list.update(this.rows(run, going, ended), ({ name }) => name);
    this.draw();
  }

  rows(run, going, ended) {
    const left = going && run.rate_per_s > 0 ? (run.total - ended) / run.rate_per_s : null;
    return [
      { name: "finished", value: `${count(run.done + run.already_done)}\u2009/\u2009${count(run.total)}` },
      { name: "running", value: count(run.running) },
      { name: "failed", value: count(run.failed), level: run.failed ? "bad" : null },
      { name: "run again", value: count(run.run_again) },
      { name: "lost sessions", value: count(run.lost_sessions), level: run.lost_sessions ? "bad" : null },
      { name: "mean reward", value: reward(run.reward_count ? run.reward_sum / run.reward_count : null) },
      { name: "per second", value: number(going ? run.rate_per_s : run.done / Math.max(0.001, run.updated_at - run.started_at)) },
      going ? { name: "time left", value: duration(left) } : { name: "took", value: duration(run.updated_at - run.started_at) },
    ];
  }

  draw() {
    if (!this.details.open || !this.run) return;
    const { history, started_at: from, updated_at: until, reward_bounds: bounds, reward_histogram: counts } = this.run;
    const at = history.map(([time]) => time);
    const to = Math.max(until, from + 10);
    const field = (place) => history.map((point) => point[place]);
    this.charts.ended.update({
      at, from, to,
      series: [
        { name: "finished", values: field(1), color: 2 },
        { name: "failed", values: field(2), color: "bad" },
      ],
    });
    this.charts.rate.update({ at, from, to, series: [{ name: "ended per second", values: rates(history), color: 0 }] });
    const means = history.map(([, done, , sum]) => (done ? sum / done : null));
    this.charts.reward.update({ at, from, to, series: [{ name: "mean reward", values: means, color: 3 }] });
    this.charts.rewards.update(rewardBars(bounds, counts));
  }
}

class FigureView {
  constructor() {
    this.name = h("dt", {});
    this.value = h("dd", {});
    this.element = h("div", {}, this.name, this.value);
  }

  update({ name, value, level }) {
    setText(this.name, name);
    setText(this.value, value);
    setAttribute(this.element, "data-level", level);
  }
}

/** All runs that use this deployment. */
export class Runs {
  constructor() {
    const element = document.getElementById("runs");
    this.none = h("p", { class: "card muted" }, "No run uses these servers yet. This starts one: ", h("code", {}, "gym eval run --no-serve"));
    element.before(this.none);
    this.list = new Keyed(element, (run) => new RunView(run));
  }

  update({ runs }) {
    this.none.hidden = runs.length > 0;
    this.list.update(runs, ({ run_id: id }) => id);
  }
}
