// Puts the page together: list and summary at once, plots when plotly.js is unpacked.

function trouble(error) {
  at("trouble").hidden = false;
  at("trouble").textContent = `This report can't be shown: ${error.message}`;
}

class Model {
  constructor(facts) {
    this.facts = facts;
    this.runs = facts.runs.length;
    this.rows = rowsOf(facts);
    this.table = new TaskTable(facts, (task) => this.openTask(task));
    this.list = new RolloutList(this.rows, this.runs, (row) => this.open(row));
    this.reader = new Reader(at("opened"), this);
    this.list.onquery = (query) => {
      this.reader.query = query;
      this.reader.highlight();
    };
  }

  open(row) {
    return this.show(row, [row]);
  }

  // Opens one rollout, or two, of which `row` is the one that the list and the address show.
  show(row, rows) {
    this.list.select(row);
    const shown = this.reader.show(rows);
    try {
      history.replaceState(null, "", `#rollout-${row.side}-${row.at}`);
    } catch {
      // Some browsers take only so many in a while, as when `j` is held down.
    }
    return shown;
  }

  // Opens the rollout that the address names.
  openNamed() {
    const [, side, place] = location.hash.match(/^#rollout-(\d+)-(\d+)$/) ?? [];
    const row = side && this.rows.find((one) => one.side === Number(side) && one.at === Number(place));
    if (!row) return;
    at("reader").scrollIntoView();
    this.list.include(row);
    this.open(row);
  }

  // The rollout of the other run that goes with one: the same of the paired task's, or the nearest.
  pairOf(row) {
    const others = row.task.other?.rows ?? [];
    return others.find((other) => other.rollout === row.rollout) ?? others[0] ?? null;
  }

  openPair(row) {
    const other = this.pairOf(row);
    return this.show(row, row.side === 0 ? [row, other] : [other, row]);
  }

  openTask(task) {
    const tasks = this.runs > 1 ? [task.a, task.b].filter(Boolean) : [task];
    this.list.ofTask(tasks);
    const row = tasks[0].rows[0];
    at("reader").scrollIntoView();
    if (tasks.length > 1 && tasks.every((one) => one.rows.length)) return this.openPair(row);
    return row ? this.open(row) : null;
  }

  // What a click in a plot stands for: a task, a rollout or a kind of failure of a run.
  choose(side, task, place = null, kind = null) {
    const run = this.facts.runs[side];
    at("reader").scrollIntoView();
    if (kind !== null) {
      this.list.set({ kind, ...(this.runs > 1 ? { side: String(side) } : {}) });
    } else if (place !== null) {
      const row = this.rows.find((one) => one.side === side && one.at === place);
      this.list.include(row);
      this.open(row);
    } else {
      const found = run.tasks.find((one) => one.index === task);
      if (this.runs > 1) {
        const pair = side ? { a: found.other, b: found } : { a: found, b: found.other };
        this.openTask(pair);
      } else this.openTask(found);
    }
  }

  back() {
    document.body.classList.remove("reading");
    at("list").focus();
  }
}

function keys(model) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "Escape") {
      if (!event.target.value) model.back();
    } else if (typing) return;
    else if (event.key === "/") {
      event.preventDefault();
      at("query").focus();
    } else if (event.key === "j") model.list.step(1);
    else if (event.key === "k") model.list.step(-1);
  });
}

function theming(plots) {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = at("theme");
  const name = () => {
    button.textContent = (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "Light" : "Dark";
  };
  button.addEventListener("click", () => {
    root.dataset.theme = button.textContent.toLowerCase();
    name();
    plots.drawAll();
  });
  dark.addEventListener("change", () => {
    name();
    plots.drawAll();
  });
  name();
}

async function main() {
  if (!globalThis.DecompressionStream) throw new Error("it needs a browser of 2023 or later");
  const facts = JSON.parse(await unpack(await packedText("facts")));
  showSummary(facts);
  const model = new Model(facts);
  const plots = new Plots(facts.figures, (...chosen) => model.choose(...chosen));
  keys(model);
  theming(plots);
  model.openNamed();
  addEventListener("hashchange", () => model.openNamed());
  document.documentElement.dataset.ready = "list";
  await loadPlotly();
  await plots.drawAll();
  await wholePage;
  document.documentElement.dataset.ready = "all";
}

main().catch(trouble);
