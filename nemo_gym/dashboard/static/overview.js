// What is wrong, the figures of everything together, what they were before, and what has happened.

import { LineChart } from "./charts.js";
import { Keyed, h, setAttribute, setText } from "./dom.js";
import { UNKNOWN, clock, count, duration, number, plural, reward, short } from "./format.js";

const ANNOUNCE_EVERY_MS = 5000;
const SOLVED_AFTER_MS = 30000;
const SPANS = [
  ["5 min", 300],
  ["15 min", 900],
  ["1 hour", 3600],
];
const SHORTEST_S = 60;
export const COLORS = 8;

/** Adds a text to an element; what stands between backticks as code. */
export function addText(element, text) {
  text.split("`").forEach((part, place) => {
    if (part) element.append(place % 2 ? h("code", {}, part) : part);
  });
  return element;
}

class FindingView {
  constructor() {
    this.level = h("span", { class: "level" });
    this.server = h("b", {});
    this.text = h("span", {});
    this.element = h("li", {}, this.level, h("p", {}, this.server, " ", this.text));
  }

  update({ severity, server, text }) {
    setAttribute(this.element, "data-level", severity);
    setText(this.level, severity);
    setText(this.server, server);
    if (this.shown === text) return;
    this.shown = text;
    this.text.replaceChildren();
    addText(this.text, text);
  }
}

const problems = (findings) => findings.filter(({ severity }) => severity !== "note").length;

const keyOfFinding = ({ server, kind, worker }) => `${server} ${kind} ${worker}`;

/** What is wrong, the worst first. Tells a screen reader of what comes and goes, never of figures that change. */
export class Verdict {
  constructor() {
    this.element = document.getElementById("verdict");
    this.title = document.getElementById("verdict-title");
    this.list = new Keyed(document.getElementById("findings"), () => new FindingView());
    this.status = document.getElementById("announcements");
    this.known = null;
    this.waiting = [];
    setInterval(() => this.announce(), ANNOUNCE_EVERY_MS);
  }

  update({ findings, servers }) {
    this.list.update(findings, keyOfFinding);
    const worst = ["error", "warning", "note"].find((level) => findings.some(({ severity }) => severity === level));
    const starting = servers.filter(({ state }) => state === "starting").length;
    setAttribute(this.element, "data-level", worst ?? (starting ? "waiting" : "good"));
    const title = this.words(findings, servers, starting);
    setText(this.title, title);
    document.title = worst === "error" || worst === "warning" ? `(${problems(findings)}) NeMo Gym` : "NeMo Gym";
    this.compare(findings, title);
  }

  words(findings, servers, starting) {
    const serious = problems(findings);
    if (serious) return plural(serious, "problem");
    if (starting) return `${plural(starting, "server")} of ${servers.length} still starting`;
    return servers.length ? `${servers.length === 1 ? "The server answers" : `All ${servers.length} servers answer`}; nothing is wrong` : "This deployment has no servers";
  }

  compare(findings, title) {
    const now = performance.now();
    if (this.known === null) {
      this.known = new Map();
      this.waiting.push(title);
    }
    for (const finding of findings) {
      const key = keyOfFinding(finding);
      const text = `${finding.server}: ${finding.text}`;
      if (!this.known.has(key)) this.waiting.push(`Problem. ${text}`);
      this.known.set(key, { text, seenAt: now });
    }
    for (const [key, { text, seenAt }] of this.known) {
      // What comes and goes is told when it comes, and once it has stayed away.
      if (now - seenAt < SOLVED_AFTER_MS) continue;
      this.waiting.push(`Solved. ${text}`);
      this.known.delete(key);
    }
  }

  announce() {
    if (!this.waiting.length) return;
    setText(this.status, this.waiting.slice(0, 3).join(" "));
    this.waiting = [];
  }
}

class Tile {
  constructor() {
    this.name = h("dt", {});
    this.value = h("dd", { class: "value" });
    this.more = h("dd", { class: "more" });
    this.element = h("div", { class: "card tile" }, this.name, this.value, this.more);
  }

  update({ name, value, more, level }) {
    setText(this.name, name);
    setText(this.value, value);
    setText(this.more, more);
    setAttribute(this.element, "data-level", level);
  }
}

const sum = (items, pick) => items.reduce((total, item) => total + (pick(item) ?? 0), 0);

/** The figures of all servers, and of all runs that go on (or else of the last one). */
export class Tiles {
  constructor() {
    this.tiles = new Keyed(document.getElementById("tiles"), () => new Tile());
  }

  update({ servers, runs }) {
    const going = runs.filter(({ finished }) => finished === null);
    this.tiles.update([...this.ofRuns(going.length ? going : runs.slice(0, 1)), ...this.ofServers(servers)], ({ name }) => name);
  }

  ofRuns(runs) {
    const done = sum(runs, (run) => run.done + run.already_done);
    const [failed, running] = [sum(runs, (run) => run.failed), sum(runs, (run) => run.running)];
    const [total, rewards] = [sum(runs, (run) => run.total), sum(runs, (run) => run.reward_count)];
    const lost = sum(runs, (run) => run.lost_sessions);
    const going = runs.some(({ finished }) => finished === null);
    const rate = going ? sum(runs, (run) => run.rate_per_s) : null;
    const left = going && rate > 0 ? duration((total - done - failed) / rate) : UNKNOWN;
    return [
      { name: "Rollouts", value: runs.length ? short(done) : UNKNOWN, more: runs.length ? going ? `of ${short(total)}; ${count(running)} running` : `of ${short(total)}; last run` : "no run yet" },
      { name: "Failed", value: runs.length ? count(failed) : UNKNOWN, more: runs.length ? `${count(lost)} lost and run again` : "no run yet", level: failed ? "bad" : null },
      { name: "Rollouts / s", value: going ? number(rate) : UNKNOWN, more: going ? `${left} left` : "no run goes on" },
      { name: "Mean reward", value: rewards ? reward(sum(runs, (run) => run.reward_sum) / rewards) : UNKNOWN, more: `of ${plural(rewards, "rollout")}` },
    ];
  }

  ofServers(servers) {
    const known = servers.map(({ totals }) => totals).filter((totals) => totals !== null);
    // Of a server that hides its figures it is not known; one that does not answer has none.
    const [workers, wanted] = [sum(known, (one) => one.responding), sum(servers.filter(({ state }) => state !== "hidden"), (one) => one.num_workers)];
    const [lost, restarts] = [sum(known, (one) => one.sessions_lost), sum(known, (one) => one.restarts)];
    const rates = known.map((one) => one.requests_per_s).filter((rate) => rate !== null);
    return [
      { name: "Sessions open", value: known.length ? short(sum(known, (one) => one.sessions_open)) : UNKNOWN, more: `${count(lost)} lost with workers`, level: lost ? "bad-more" : null },
      { name: "Requests / s", value: rates.length ? number(sum(rates, (rate) => rate)) : UNKNOWN, more: `${count(sum(known, (one) => one.in_flight))} in flight` },
      { name: "Workers", value: known.length ? `${workers}/${wanted}` : UNKNOWN, more: plural(restarts, "restart"), level: known.length && workers < wanted ? "bad" : restarts ? "bad-more" : null },
    ];
  }
}

/** Sessions and requests of each server over time. */
export class OverTime {
  constructor() {
    this.charts = {
      sessions: new LineChart("Sessions open", short),
      requests_per_s: new LineChart("Requests per second", number),
      in_flight: new LineChart("Requests in flight", short),
    };
    document.getElementById("charts").append(...Object.values(this.charts).map(({ element }) => element));
    this.span = SPANS[0][1];
    const choices = document.getElementById("spans");
    for (const [label, seconds] of SPANS) {
      const input = h("input", { type: "radio", name: "span", value: seconds, checked: seconds === this.span });
      input.addEventListener("change", () => this.choose(seconds));
      choices.append(h("label", {}, input, h("span", {}, label)));
    }
  }

  choose(seconds) {
    this.span = seconds;
    if (this.data) this.update(this.data);
  }

  update(data) {
    this.data = data;
    const { at, servers } = data.history;
    const to = data.at;
    const from = Math.max(to - this.span, Math.min(at[0] ?? to, to - SHORTEST_S));
    for (const [field, chart] of Object.entries(this.charts)) {
      const series = data.servers
        .map(({ name, kind }, place) => ({ name, kind, color: place % COLORS, values: servers[name]?.[field] }))
        .filter(({ values }) => values)
        // Agents may hold sessions, and most do not.
        .filter(({ kind, values }) => field !== "sessions" || kind === "resources_servers" || values.some((value) => value > 0));
      chart.update({ at, series, from, to });
    }
  }
}

class EventView {
  constructor() {
    this.time = h("time", {});
    this.level = h("span", { class: "level" });
    this.server = h("b", {});
    this.text = h("span", {});
    this.element = h("li", {}, this.time, this.level, h("p", {}, this.server, " ", this.text));
  }

  update({ at, level, server, text }) {
    setAttribute(this.element, "data-level", level);
    setAttribute(this.time, "datetime", new Date(at * 1000).toISOString());
    setText(this.time, clock(at));
    setText(this.level, level);
    setText(this.server, server);
    setText(this.text, text);
  }
}

/** What has happened to servers and workers, the latest first. */
export class Events {
  constructor() {
    this.element = document.getElementById("events");
    this.list = new Keyed(this.element, () => new EventView());
    this.none = h("p", { class: "card muted none" }, "No worker or server has been lost or replaced since the deployment started.");
    this.element.before(this.none);
  }

  update({ events }) {
    this.none.hidden = events.length > 0;
    this.element.hidden = events.length === 0;
    this.list.update(events, ({ at, server, text }) => `${at} ${server} ${text}`);
  }
}
