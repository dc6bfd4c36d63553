// Lists of any length: only the lines in view stand in the document.

const OVERSCAN = 6;

class VirtualList {
  constructor(root, height, render) {
    Object.assign(this, { root, height, render, rows: [], drawn: new Map(), selected: null });
    this.space = el("div", { class: "space" });
    root.append(this.space);
    root.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(root);
  }

  set(rows) {
    this.rows = rows;
    this.space.style.height = `${rows.length * this.height}px`;
    this.redraw();
  }

  redraw() {
    for (const line of this.drawn.values()) line.remove();
    this.drawn.clear();
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.root.scrollTop / this.height) - OVERSCAN);
    const last = Math.min(this.rows.length, Math.ceil((this.root.scrollTop + this.root.clientHeight) / this.height) + OVERSCAN);
    for (const [position, line] of this.drawn) {
      if (position < first || position >= last) {
        line.remove();
        this.drawn.delete(position);
      }
    }
    for (let position = first; position < last; position += 1) {
      if (!this.drawn.has(position)) {
        const line = this.render(this.rows[position], position);
        line.style.transform = `translateY(${position * this.height}px)`;
        line.style.height = `${this.height}px`;
        this.space.append(line);
        this.drawn.set(position, line);
      }
    }
  }

  reveal(position) {
    const top = position * this.height;
    if (top < this.root.scrollTop) this.root.scrollTop = top;
    else if (top + this.height > this.root.scrollTop + this.root.clientHeight) {
      this.root.scrollTop = top + this.height - this.root.clientHeight;
    }
    this.draw();
  }
}

// The place that is some steps from another, or the first where there is no other.
const stepped = (length, position, by) => (position < 0 && by < Infinity ? 0 : Math.min(length - 1, Math.max(0, position + by)));

// Where a key leads in a list; null for a key that leads nowhere.
function steppedBy(event, list, position) {
  const page = Math.max(1, Math.floor(list.root.clientHeight / list.height) - 1);
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
  if (!Object.hasOwn(steps, event.key) || !list.rows.length) return null;
  event.preventDefault();
  return stepped(list.rows.length, position, steps[event.key]);
}

// The list of rollouts with its search and filters.
class RolloutList {
  constructor(rows, runs, open) {
    Object.assign(this, { all: rows, shown: rows, runs, open, task: null, found: null, query: "", selected: null });
    this.search = new Search(rows);
    this.list = new VirtualList(at("list"), 58, (row, position) => this.line(row, position));
    this.controls();
    at("list").addEventListener("keydown", (event) => this.key(event));
    this.apply();
  }

  controls() {
    const kinds = [...new Set(this.all.map((row) => row.kind).filter((kind) => kind !== null))].sort();
    const agents = [...new Set(this.all.map((row) => row.agent))].filter(Boolean).sort();
    const outcomes = ["passed", "not passed", "unscored", "failed"].filter((name) => this.all.some((row) => row.outcome === name));
    this.fields = {
      query: el("input", { type: "search", id: "query", placeholder: "Search all texts", "aria-label": "Search all texts", autocomplete: "off", spellcheck: "false" }),
      outcome: choice("Outcome", [["", "any outcome"], ...outcomes.map((name) => [name, name])]),
      kind: choice("Failure", [["", "any failure"], ...kinds.map((kind) => [kind, kind])]),
      agent: choice("Agent", [["", "any agent"], ...agents.map((agent) => [agent, agent])]),
      side: choice("Run", [["", "both runs"], ["0", "run A"], ["1", "run B"]]),
      task: el("input", { type: "search", id: "task-filter", placeholder: "Task", "aria-label": "Number or name of a task", autocomplete: "off" }),
      least: el("input", { type: "number", step: "any", placeholder: "reward ≥", "aria-label": "Least reward" }),
      most: el("input", { type: "number", step: "any", placeholder: "reward ≤", "aria-label": "Greatest reward" }),
      order: choice("Order", [["task", "by task"], ["reward", "reward, low first"], ["-reward", "reward, high first"], ["-output_tokens", "most tokens"],
        ["-turns", "most turns"], ["-seconds", "slowest"], ["line", "as in the file"]]),
    };
    const { fields } = this;
    fields.kind.hidden = !kinds.length;
    fields.agent.hidden = agents.length < 2;
    fields.side.hidden = this.runs < 2;
    this.chosen = el("button", { type: "button", class: "chosen", hidden: true, on: { click: () => this.ofTask(null) } });
    const clear = el("button", { type: "button", on: { click: () => this.reset() } }, "Clear");
    at("filters").append(fields.query, fields.task, fields.outcome, fields.kind, fields.agent, fields.side, fields.least, fields.most,
      fields.order, this.chosen, clear);
    at("filters").addEventListener("submit", (event) => event.preventDefault());
    at("filters").addEventListener("input", (event) => {
      if (event.target !== fields.query) this.apply();
    });
    fields.query.addEventListener("input", () => {
      clearTimeout(this.waiting);
      this.waiting = setTimeout(() => this.find(fields.query.value), 150);
    });
  }

  find(query) {
    clearTimeout(this.waiting);
    this.search.stop();
    this.query = query;
    this.found = query ? new Map() : null;
    this.progress = query ? "searching" : null;
    this.onquery?.(query);
    this.apply();
    if (!query) return;
    let last = 0;
    this.search.run(query, (found, done, total) => {
      this.found = found;
      this.progress = done < total ? `searched ${Math.floor((100 * done) / total)} %` : null;
      // A list of thousands is sorted a few times a second, not after each block.
      if (done === total || performance.now() - last > 250) {
        this.apply();
        last = performance.now();
      }
    }).catch((error) => this.tell(`The search stopped: ${error.message}`));
  }

  // Takes back all that hides rollouts, the search too; their order stays.
  reset() {
    const order = this.fields.order.value;
    at("filters").reset();
    this.fields.order.value = order;
    this.task = null;
    this.find("");
  }

  // Shows only the rollouts of one task, all of them; of both runs where it is in both.
  ofTask(tasks) {
    if (tasks) this.reset();
    this.task = tasks;
    this.apply();
    at("list").scrollTop = 0;
    this.list.draw();
  }

  // Sees to it that a rollout is in the list.
  include(row) {
    if (!this.shown.includes(row)) this.reset();
  }

  set(values) {
    this.reset();
    for (const [name, given] of Object.entries(values)) this.fields[name].value = given;
    this.apply();
  }

  apply() {
    const { fields } = this;
    const number = (input) => (input.value === "" ? null : Number(input.value));
    const [least, most] = [number(fields.least), number(fields.most)];
    const wanted = fields.task.value.trim().toLowerCase();
    // A number is that of a task where there is one, else a part of a name.
    const numbered = /^\d+$/.test(wanted) ? this.all.find((row) => row.task.index === Number(wanted))?.task : null;
    const tasks = this.task && new Set(this.task);
    const matches = (row) => (this.found === null || this.found.has(row))
      && (!tasks || tasks.has(row.task))
      && (!fields.outcome.value || row.outcome === fields.outcome.value)
      && (!fields.kind.value || row.kind === fields.kind.value)
      && (!fields.agent.value || row.agent === fields.agent.value)
      && (!fields.side.value || row.side === Number(fields.side.value))
      && (least === null || (row.reward !== null && row.reward >= least))
      && (most === null || (row.reward !== null && row.reward <= most))
      && (!wanted || (numbered ? row.task.index === numbered.index : taskName(row.task).toLowerCase().includes(wanted)));
    this.shown = this.all.filter(matches).sort(orderBy(fields.order.value));
    this.chosen.hidden = !tasks;
    this.chosen.textContent = tasks ? `only ${taskName(this.task[0])} ✕` : "";
    this.list.set(this.shown);
    this.tell();
  }

  tell(text = null) {
    const all = this.shown.length === this.all.length;
    const base = all ? plural(this.all.length, "rollout") : `${count(this.shown.length)} of ${plural(this.all.length, "rollout")}`;
    at("found").textContent = text ?? (this.progress ? `${base} · ${this.progress}` : base);
  }

  line(row, position) {
    const match = this.found?.get(row);
    const preview = match || row.answer || row.task.text;
    const facts = [row.output_tokens === null ? null : `${short(row.output_tokens)} tok`,
      row.turns === null ? null : plural(row.turns, "turn"), row.seconds === null ? null : seconds(row.seconds)].filter(Boolean);
    return el("div", {
      class: "row", role: "option", id: `row-${row.side}-${row.at}`, "aria-selected": String(row === this.selected),
      "aria-setsize": this.shown.length, "aria-posinset": position + 1, on: { click: () => this.open(row) },
    },
    el("div", { class: "row-head" }, this.runs > 1 ? chip("AB"[row.side], `side-${row.side}`) : null,
      el("span", { class: "row-name" }, taskName(row.task)), el("span", { class: "quiet" }, `#${row.rollout}`),
      el("span", { class: `badge ${row.outcome.replace(" ", "-")}` }, badgeText(row))),
    el("div", { class: "row-text" }, el("span", { class: "row-preview" }, preview), match ? null : el("span", { class: "quiet" }, facts.join(" · "))));
  }

  select(row) {
    this.selected = row;
    this.list.redraw();
    const position = this.shown.indexOf(row);
    if (position >= 0) {
      this.list.reveal(position);
      at("list").setAttribute("aria-activedescendant", `row-${row.side}-${row.at}`);
    }
  }

  step(by) {
    const next = this.shown[stepped(this.shown.length, this.shown.indexOf(this.selected), by)];
    if (next) this.open(next);
  }

  key(event) {
    const to = steppedBy(event, this.list, this.shown.indexOf(this.selected));
    if (to !== null) this.open(this.shown[to]);
    else if (event.key === "Enter" && this.selected) at("opened").querySelector(".rollout")?.focus();
  }
}

function choice(label, options) {
  return el("select", { "aria-label": label }, options.map(([given, text]) => el("option", { value: given }, text)));
}

function orderBy(name) {
  const byTask = (a, b) => a.task.index - b.task.index || a.side - b.side || a.rollout - b.rollout || a.at - b.at;
  if (name === "task") return byTask;
  if (name === "line") return (a, b) => a.side - b.side || a.at - b.at;
  const [key, sign] = name.startsWith("-") ? [name.slice(1), -1] : [name, 1];
  return (a, b) => {
    if (a[key] === null || b[key] === null) return (a[key] === null) - (b[key] === null) || byTask(a, b);
    return sign * (a[key] - b[key]) || byTask(a, b);
  };
}
