// Each server with its workers.

import { Keyed, h, setAttribute, setText } from "./dom.js";
import { UNKNOWN, bytes, count, duration, milliseconds, number, percent, plural } from "./format.js";

const KINDS = { resources_servers: "resources server", responses_api_agents: "agent", responses_api_models: "model server" };
const MANY_WORKERS = 16;
const LATE_MS = 250;

// Each column: what stands in its head, how it is written, and where it warns.
const GROUPS = [
  ["Sessions", [
    ["open", (one) => count(one.sessions_open), null],
    ["begun", (one) => count(one.sessions_created), null],
    ["lost", (one) => count(one.sessions_lost), (one) => one.sessions_lost > 0],
  ]],
  ["Requests", [
    ["in flight", (one) => count(one.in_flight), null],
    ["/ s", (one) => number(one.requests_per_s), null],
    ["handled", (one) => count(one.handled), null],
    ["p50", (one) => milliseconds(one.request_p50_ms), null],
    ["p99", (one) => milliseconds(one.request_p99_ms), null],
    ["5xx", (one) => count(one.replies["5xx"] ?? 0), (one) => (one.replies["5xx"] ?? 0) > 0],
    ["410", (one) => count(lostReplies(one)), (one) => lostReplies(one) > 0],
  ]],
  ["Passed on", [
    ["out", (one) => count(one.forwarded_out), null],
    ["in", (one) => count(one.forwarded_in), null],
    ["p99", (one) => milliseconds(one.hop_p99_ms), null],
  ]],
  ["Process", [
    ["loop lag", (one) => milliseconds(one.loop_lag_ms), (one) => one.loop_lag_ms >= LATE_MS],
    ["CPU", (one) => percent(one.cpu), null],
    ["memory", (one) => bytes(one.memory_bytes), null],
  ]],
];
const ALWAYS_KNOWN = new Set(["lost"]);

function lostReplies({ lost_replies: replies }) {
  return Object.values(replies).reduce((total, one) => total + one, 0);
}

function workerHealth({ responding, state }) {
  if (state === "starting" || state === "leaving") return [state, "going"];
  return responding ? ["ok", "good"] : ["silent", "error"];
}

class WorkerRow {
  constructor() {
    this.name = h("th", { scope: "row" });
    this.state = h("span", { class: "pill" });
    this.restarts = h("td", { class: "restarts" }, h("span", {}), h("small", {}));
    this.up = h("td", {});
    this.cells = GROUPS.flatMap(([, columns]) => columns).map(([name, write, warns]) => ({ name, write, warns, element: h("td", {}) }));
    [this.sessions] = this.cells;
    this.sessions.text = h("span", {});
    this.share = h("i", { class: "share", "aria-hidden": "true" });
    this.sessions.element.append(this.share, this.sessions.text);
    this.sessions.element.classList.add("shared");
    this.element = h("tr", {}, this.name, h("td", {}, this.state), ...this.cells.map(({ element }) => element), this.up, this.restarts);
  }

  update({ worker, most, at }) {
    setText(this.name, worker.slot);
    setAttribute(this.name, "title", `process ${worker.pid}`);
    const [word, level] = workerHealth(worker);
    setText(this.state, word);
    setAttribute(this.state, "data-level", level);
    for (const { name, write, warns, element, text } of this.cells) {
      const known = worker.responding || ALWAYS_KNOWN.has(name);
      const shown = known ? write(worker) : UNKNOWN;
      setText(text ?? element, shown);
      element.classList.toggle("nothing", shown === "0" || shown === UNKNOWN);
      setAttribute(element, "data-level", known && warns?.(worker) ? "bad" : null);
    }
    this.share.style.width = `${most ? (100 * worker.sessions_open) / most : 0}%`;
    setText(this.up, worker.started_at ? duration(Math.max(0, at - worker.started_at)) : UNKNOWN);
    setText(this.restarts.firstChild, count(worker.restarts));
    setText(this.restarts.lastChild, worker.last_exit ?? "");
    setAttribute(this.restarts, "data-level", worker.restarts ? "bad" : null);
  }
}

function head() {
  const groups = GROUPS.map(([name, columns]) => h("th", { scope: "colgroup", colspan: columns.length }, name));
  const names = GROUPS.flatMap(([, columns]) => columns.map(([name]) => h("th", { scope: "col" }, name)));
  const ends = ["up for", "restarts"].map((name) => h("th", { scope: "col" }, name));
  return h(
    "thead",
    {},
    h("tr", { class: "groups" }, h("th", { scope: "colgroup", colspan: 2 }, h("span", { class: "unseen" }, "Worker")), ...groups, h("th", { scope: "colgroup", colspan: 2 }, "Life")),
    h("tr", {}, h("th", { scope: "col" }, "worker"), h("th", { scope: "col" }, "health"), ...names, ...ends),
  );
}

class ServerView {
  constructor({ name, num_workers: workers }) {
    this.title = h("h3", {}, name);
    this.kind = h("span", { class: "muted" });
    this.state = h("span", { class: "pill" });
    this.address = h("p", { class: "muted" });
    this.figures = h("dl", { class: "figures" });
    this.values = new Map();
    this.body = h("tbody", {});
    this.rows = new Keyed(this.body, () => new WorkerRow());
    const table = h("table", { class: "workers" }, h("caption", { class: "unseen" }, `Workers of ${name}`), head(), this.body);
    this.scroller = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Workers of ${name}` }, table);
    this.details = h("details", { open: workers > 1 && workers <= MANY_WORKERS }, h("summary", {}, plural(workers, "worker")), this.scroller);
    this.element = h("article", { class: "card server" }, h("div", { class: "bar" }, this.title, this.kind, this.state), this.address, this.figures, this.details);
  }

  update({ server, at }) {
    const { totals } = server;
    setText(this.kind, `${KINDS[server.kind] ?? server.kind}, ${server.implementation}`);
    setText(this.address, server.problem ? `${server.url}: ${server.problem}` : server.url);
    const [word, level] = this.health(server);
    setText(this.state, word);
    setAttribute(this.state, "data-level", level);
    this.figures.hidden = this.details.hidden = totals === null;
    if (totals === null) return;
    this.figure("sessions", count(totals.sessions_open));
    this.figure("lost", count(totals.sessions_lost), totals.sessions_lost > 0);
    this.figure("in flight", count(totals.in_flight));
    this.figure("requests / s", number(totals.requests_per_s));
    this.figure("p50", milliseconds(totals.request_p50_ms));
    this.figure("p99", milliseconds(totals.request_p99_ms));
    this.figure("CPU", percent(totals.cpu));
    this.figure("memory", bytes(totals.memory_bytes));
    const most = Math.max(...server.workers.map((worker) => worker.sessions_open), 0);
    this.rows.update(server.workers.map((worker) => ({ worker, most, at })), ({ worker }) => `${worker.slot} ${worker.pid}`);
  }

  health({ state, totals, workers, num_workers: wanted }) {
    if (state === "starting") return ["starting", "going"];
    if (state === "silent") return ["does not answer", "error"];
    if (state === "hidden") return ["ok, figures hidden", "good"];
    const silent = workers.some((worker) => workerHealth(worker)[1] === "error");
    return [`${totals.responding} of ${wanted} ok`, silent ? "error" : totals.responding < wanted ? "warning" : "good"];
  }

  figure(name, text, bad = false) {
    if (!this.values.has(name)) {
      const value = h("dd", {});
      const element = h("div", {}, h("dt", {}, name), value);
      this.values.set(name, { element, value });
      this.figures.append(element);
    }
    const { element, value } = this.values.get(name);
    setText(value, text);
    setAttribute(element, "data-level", bad ? "bad" : null);
  }
}

/** All servers of the deployment. */
export class Servers {
  constructor() {
    this.list = new Keyed(document.getElementById("servers"), ({ server }) => new ServerView(server));
  }

  update({ servers, at }) {
    this.list.update(servers.map((server) => ({ server, at })), ({ server }) => server.name);
  }
}
