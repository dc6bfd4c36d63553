// The figures at the top, the comparison of two runs, and the table of tasks.

const MEASURES = {
  reward: { name: "mean reward", show: reward, better: 1 },
  passed: { name: "pass rate", show: percent, better: 1 },
  output_tokens: { name: "output tokens", show: (value) => short(value), better: 0 },
  turns: { name: "turns", show: (value) => short(value), better: 0 },
  tool_calls: { name: "tool calls", show: (value) => short(value), better: 0 },
  seconds: { name: "duration", show: seconds, better: 0 },
};

function span(interval, show) {
  return interval.low === null ? null : `${show(interval.low)} to ${show(interval.high)}`;
}

function cardOf(name, value, note = null, title = undefined) {
  return el("div", { class: "card", title }, el("div", { class: "card-name" }, name), el("div", { class: "card-value" }, value),
    note ? el("div", { class: "card-note" }, note) : null);
}

const short3 = (value, measure) => (measure === "passed" ? percent(value) : short(value));

function cards(run, threshold) {
  const { intervals, tasks } = run;
  const failed = Object.values(run.failures).reduce((sum, number) => sum + number, 0);
  const shown = [cardOf("rollouts", count(run.rollouts.task.length - failed), `of ${plural(tasks.length, "task")}`)];
  for (const measure of ["reward", "passed"]) {
    const interval = intervals[measure];
    if (interval.value !== null) {
      const { name, show } = MEASURES[measure];
      const title = measure === "passed" ? `reward ≥ ${threshold}` : undefined;
      const alone = tasks.filter((task) => task.scored).length === 1 ? "one task, so no interval" : "every task the same";
      shown.push(cardOf(name, show(interval.value), interval.low === null ? alone : `${short3(interval.low, measure)} – ${short3(interval.high, measure)}`, title));
    }
  }
  // The most tries that are not about a few tasks only.
  const most = run.pass_at_k.findLast((entry) => 2 * entry.tasks >= entry.of);
  if (most && most.k > 1) {
    const note = most.tasks < most.of ? `${count(most.tasks)} of ${plural(most.of, "task")}` : `one of ${most.k} passes`;
    shown.push(cardOf(`pass@${most.k}`, percent(most.value), note));
  }
  for (const measure of ["output_tokens", "turns", "seconds"]) {
    const interval = intervals[measure];
    const { name, show } = MEASURES[measure];
    if (interval.value !== null) shown.push(cardOf(name, show(interval.value), "mean over tasks"));
  }
  shown.push(cardOf("failed", count(failed), failed ? `${percent(failed / run.rollouts.task.length)} of all` : "none"));
  return el("div", { class: "cards" }, shown);
}

function notices(facts) {
  const two = facts.comparison !== null;
  const texts = facts.runs.flatMap((run, side) => run.notices.map((text) => (two ? `${"AB"[side]}: ${text}` : text)));
  for (const run of facts.runs) {
    const failed = Object.values(run.failures).reduce((sum, number) => sum + number, 0);
    if (failed) {
      const share = percent(failed / run.rollouts.task.length);
      texts.push(`${run.name}: ${plural(failed, "rollout")} (${share}) failed and ${failed === 1 ? "has" : "have"} no part in any other figure.`);
    }
  }
  const scored = two ? [Math.max(...facts.comparison.measures.map((measured) => measured.tasks))]
    : facts.runs.map((run) => run.tasks.filter((task) => task.scored).length);
  if (scored.some((tasks) => tasks > 1 && tasks < facts.few_tasks)) texts.push(`With fewer than ${facts.few_tasks} tasks the intervals tend to be too narrow.`);
  return texts.map((text) => el("p", { class: "notice" }, text));
}

function noInterval(measured, comparison) {
  if (measured.tasks === 1) return "no interval: one task";
  return comparison.paired_by ? "no interval: every task differs by the same" : "no interval: all tasks of a run are the same";
}

function comparisonTable(comparison) {
  const rows = comparison.measures.filter((measured) => measured.first.value !== null || measured.second.value !== null).map((measured) => {
    const { name, show, better } = MEASURES[measured.name];
    const cell = (interval) => el("td", {}, el("div", {}, interval.value === null ? "–" : show(interval.value)),
      el("div", { class: "quiet" }, span(interval, show) ?? ""));
    const { value: difference, low, high } = measured.difference;
    const clear = low !== null && (low > 0 || high < 0);
    const style = clear && better ? (difference > 0 ? "good" : "bad") : "";
    const unit = measured.name === "passed" ? (given) => `${short(100 * given)} points` : show;
    const text = difference === null ? "–" : signed(measured.name === "seconds" ? (difference < 0 ? `-${seconds(-difference)}` : seconds(difference)) : unit(difference), difference);
    const bare = measured.name === "passed" ? (given) => short(100 * given) : show;
    const ends = (given) => (measured.name === "seconds" && given < 0 ? `−${seconds(-given)}` : signed(bare(given), given));
    const verdict = low === null ? noInterval(measured, comparison) : `${ends(low)} to ${ends(high)}`;
    return el("tr", {}, el("th", { scope: "row" }, name), cell(measured.first), cell(measured.second),
      el("td", { class: style }, el("div", {}, text, clear ? " ●" : ""), el("div", { class: "quiet verdict-text" }, difference === null ? "" : verdict)));
  });
  return el("div", { class: "scroll" }, el("table", { class: "comparison" },
    el("thead", {}, el("tr", {}, ["", "A", "B", "B less A"].map((text) => el("th", { scope: "col" }, text)))), el("tbody", {}, rows)));
}

function comparisonText(facts) {
  const { comparison } = facts;
  const by = { row: "the content of their row", index: "their row's number" }[comparison.paired_by];
  const both = comparison.better + comparison.same + comparison.worse;
  const left = comparison.only_first + comparison.only_second;
  const pairing = comparison.paired_by
    ? `Paired by task: ${plural(both, "task")} with rewards in both runs, told by ${by}`
      + `${left ? `; ${count(comparison.only_first)} with rewards only in A and ${count(comparison.only_second)} only in B are left out here` : ""}.`
    : `No task has a result in both runs, so they are compared as independent samples of ${count(comparison.only_first)} and ${plural(comparison.only_second, "task")} with rewards. `
      + "If their rows are the same tasks in the same order, --pair-by index pairs them by number.";
  const method = "Every figure is the mean over tasks of each task's mean. Intervals are 95 %, by the percentile bootstrap over tasks "
    + "(all rollouts of a task are drawn together), with a fixed seed. ● marks a difference whose interval leaves out zero.";
  const { better, same, worse } = comparison;
  const test = comparison.sign_test === null ? "" : ` Sign test on better against worse: p = ${short(comparison.sign_test, 2)}.`;
  return el("div", {},
    comparison.paired_by ? el("p", { class: "verdict" }, el("strong", { class: "good" }, `${count(better)} better`), " · ",
      el("strong", { class: "bad" }, `${count(worse)} worse`), " · ", `${count(same)} the same in B.${test}`) : null,
    el("p", { class: "quiet" }, pairing), el("p", { class: "quiet" }, method));
}

function runLine(run) {
  const { made } = run;
  const pieces = [];
  if (made?.agent) pieces.push(`agent ${textOf(made.agent)}`);
  for (const [name, given] of Object.entries(made?.settings ?? {})) {
    if (given !== null) pieces.push(`${name} ${textOf(given)}`);
  }
  if (made?.started_at) pieces.push(`begun ${textOf(made.started_at)}`);
  return pieces.join(" · ");
}

function showSummary(facts) {
  const names = facts.runs.map((run) => run.file).join(" and ");
  at("title").textContent = facts.comparison ? "Two runs compared" : names;
  at("made").append(...facts.runs.map((run, side) => el("span", { class: "made" },
    facts.comparison ? chip("AB"[side], `side-${side}`) : null, [facts.comparison ? run.file : "", runLine(run)].filter(Boolean).join(" · "))));
  at("notices").append(...notices(facts));
  if (facts.comparison) {
    at("summary").append(comparisonText(facts), el("div", { class: "compared" }, comparisonTable(facts.comparison), el("div", { id: "change" })));
  } else {
    at("summary").append(cards(facts.runs[0], facts.threshold), el("p", { class: "quiet method" },
      `Means are over tasks of each task's mean. The ranges are their 95 % intervals, by the percentile bootstrap over tasks with a fixed seed. A rollout passes with a reward of ${facts.threshold} or more.`));
  }
}

class TaskTable {
  constructor(facts, open) {
    this.open = open;
    this.columns = facts.comparison ? PAIR_COLUMNS : TASK_COLUMNS;
    this.all = facts.comparison ? pairedTasks(facts) : facts.runs[0].tasks;
    [this.key, this.sign] = facts.comparison ? ["difference", 1] : ["reward", 1];
    this.change = "";
    this.head = el("div", { class: "task-row task-head", role: "row" });
    this.body = el("div", { class: "task-body", role: "rowgroup", tabindex: "-1" });
    this.grid = el("div", { role: "grid", "aria-label": "Tasks", tabindex: "0", class: facts.comparison ? "pairs" : "", on: { keydown: (event) => this.press(event) } },
      el("div", { role: "rowgroup" }, this.head), this.body);
    at("task-table").append(this.grid);
    this.list = new VirtualList(this.body, 36, (task, position) => this.line(task, position));
    this.active = -1;
    this.filter = el("input", { type: "search", placeholder: "Task or its text", "aria-label": "Filter tasks", on: { input: () => this.apply() } });
    const choose = choice("Change", [["", "all tasks"], ["better", "better in B"], ["worse", "worse in B"], ["same", "the same"], ["alone", "in one run only"]]);
    choose.hidden = !facts.comparison;
    choose.addEventListener("input", () => {
      this.change = choose.value;
      this.apply();
    });
    this.told = el("span", { class: "quiet", role: "status" });
    at("task-controls").append(this.filter, choose, this.told);
    this.apply();
  }

  apply() {
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = this.all.filter((task) => (!wanted || `${taskName(task)} ${task.text}`.toLowerCase().includes(wanted))
      && (!this.change || task.change === this.change));
    const column = this.columns.find((one) => one.key === this.key);
    const order = (a, b) => {
      const [one, two] = [column.value(a), column.value(b)];
      if (one === null || two === null) return (one === null) - (two === null) || a.index - b.index;
      return this.sign * (one - two) || a.index - b.index;
    };
    this.active = -1;
    this.list.set(shown.sort(order));
    this.told.textContent = shown.length === this.all.length ? plural(shown.length, "task") : `${count(shown.length)} of ${plural(this.all.length, "task")}`;
    this.head.replaceChildren(...this.columns.map((one) => el("div", {
      role: "columnheader", class: one.style ?? "", "aria-sort": one.key === this.key ? (this.sign > 0 ? "ascending" : "descending") : "none",
    }, el("button", { type: "button", on: { click: () => this.sortBy(one.key) } }, one.name, one.key === this.key ? (this.sign > 0 ? " ↑" : " ↓") : ""))));
  }

  // Arrows go through the tasks, so that all of them are one stop on the way of the Tab key.
  press(event) {
    if (event.target !== this.grid) return;
    const to = steppedBy(event, this.list, this.active);
    if (event.key === "Enter" && this.list.rows[this.active]) {
      this.open(this.list.rows[this.active]);
      at("list").focus({ preventScroll: true });
    }
    if (to === null) return;
    this.active = to;
    this.list.redraw();
    this.list.reveal(to);
    this.grid.setAttribute("aria-activedescendant", `task-${to}`);
  }

  sortBy(key) {
    this.sign = this.key === key ? -this.sign : 1;
    this.key = key;
    this.apply();
  }

  line(task, position) {
    return el("div", { class: position === this.active ? "task-row active" : "task-row", role: "row", id: `task-${position}`, on: { click: () => this.open(task) } }, this.columns.map((one) => el("div", {
      role: "gridcell", class: `${one.style ?? ""} ${one.mood?.(task) ?? ""}`,
    }, one.link ? el("button", { type: "button", class: "link", tabindex: "-1", title: task.text }, one.show(task)) : one.show(task))));
  }
}

const numberColumn = (key, name, show, style = "number") => ({ key, name, style, value: (task) => task[key], show: (task) => (task[key] === null ? "–" : show(task[key])) });
const passRate = (task) => (task.scored ? task.passed / task.scored : null);
const NAME_COLUMN = { key: "index", name: "task", style: "name", link: true, value: (task) => task.index, show: taskName };
const TASK_COLUMNS = [
  NAME_COLUMN,
  numberColumn("reward", "mean reward", reward),
  { key: "passes", name: "passed", style: "number", value: passRate, show: (task) => (task.scored ? `${task.passed} of ${task.scored}` : "–") },
  numberColumn("failed", "failed", (value) => (value ? count(value) : "–"), "number narrow"),
  numberColumn("tokens", "output tokens", (value) => short(value), "number narrow"),
  numberColumn("turns", "turns", (value) => short(value), "number narrow"),
  numberColumn("seconds", "duration", seconds, "number narrow"),
];
const PAIR_COLUMNS = [
  NAME_COLUMN,
  numberColumn("first", "A", reward),
  numberColumn("second", "B", reward),
  {
    ...numberColumn("difference", "B less A", (value) => signed(reward(value), value)),
    mood: (task) => ({ better: "good", worse: "bad" }[task.change] ?? ""),
  },
  {
    key: "passes", name: "passed A, B", style: "number narrow", value: (task) => task.passes?.value ?? null,
    show: (task) => [task.a, task.b].map((one) => (one?.scored ? `${one.passed} of ${one.scored}` : "–")).join(", "),
  },
  {
    key: "interval", name: "points, 95 % (Newcombe)", style: "number narrow", value: (task) => task.passes?.value ?? null,
    show: (task) => (task.passes?.low == null ? "–" : [task.passes.low, task.passes.high].map((end) => signed(short(100 * end), end)).join(" to ")),
  },
];

function pairedTasks(facts) {
  const [firsts, seconds_] = facts.runs.map((run) => new Map(run.tasks.map((task) => [task.index, task])));
  const rows = facts.comparison.pairs.map((pair) => {
    const [a, b] = [firsts.get(pair.first), seconds_.get(pair.second)];
    a.other = b;
    b.other = a;
    firsts.delete(pair.first);
    seconds_.delete(pair.second);
    const change = pair.difference === null ? "" : pair.difference > 1e-9 ? "better" : pair.difference < -1e-9 ? "worse" : "same";
    return { index: b.index, label: b.label || a.label, text: b.text || a.text, a, b, first: a.reward, second: b.reward, difference: pair.difference, passes: pair.passes, change };
  });
  const alone = (task, side) => ({
    index: task.index, label: task.label, text: task.text, a: side ? null : task, b: side ? task : null,
    first: side ? null : task.reward, second: side ? task.reward : null, difference: null, passes: null, change: "alone",
  });
  return [...rows, ...[...firsts.values()].map((task) => alone(task, 0)), ...[...seconds_.values()].map((task) => alone(task, 1))];
}
