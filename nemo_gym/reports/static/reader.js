// One rollout in full, or two of the same task side by side.

const SIBLINGS = 64;
const FRAMEWORK_FIELDS = new Set(["responses_create_params", "response", "reward", "agent_ref", "row", "reply", "reason"]);

class Reader {
  constructor(root, model) {
    this.root = root;
    this.model = model;
    this.rows = [];
    this.query = "";
    this.turn = 0;
    root.addEventListener("grown", () => this.highlight());
    root.addEventListener("toggle", () => this.highlight(), true);
  }

  async show(rows) {
    this.turn += 1;
    const turn = this.turn;
    this.rows = rows;
    let columns;
    try {
      const records = await Promise.all(rows.map(recordOf));
      columns = rows.map((row, side) => this.column(row, records[side], side));
    } catch (error) {
      columns = [el("p", { class: "notice" }, `This rollout can't be shown: ${error.message}`)];
    }
    if (turn !== this.turn) return;
    this.root.replaceChildren(...columns);
    this.root.classList.toggle("pair", rows.length > 1);
    document.body.classList.add("reading");
    this.root.scrollTop = 0;
    for (const column of columns) column.scrollTop = 0;
    this.highlight();
  }

  column(row, record, side) {
    const params = record.responses_create_params ?? record.row?.responses_create_params ?? {};
    const response = record.response ?? record.reply?.response ?? {};
    const input = typeof params.input === "string" ? [params.input] : Array.isArray(params.input) ? params.input : [];
    const output = Array.isArray(response.output) ? response.output : [];
    const names = callNames([...input, ...output]);
    const item = (given) => conversationItem(given, names);
    const instructions = typeof params.instructions === "string" && params.instructions
      ? [messageItem({ role: "system", content: params.instructions })] : [];
    return el("div", { class: "rollout", tabindex: "-1" },
      this.head(row, record, side),
      row.kind === null ? null : failureBox(row, record),
      section("Asked", [...instructions, ...batches(input, item, "item")]),
      section("Answered", [...batches(output, item, "item"), ...troubles(response)],
        row.kind === null || output.length ? "The response has no output." : null),
      section("Scored", [scoreTable(row, record)]),
      el("div", { class: "details" },
        Array.isArray(params.tools) && params.tools.length ? folded(plural(params.tools.length, "tool"), () => toolList(params.tools)) : null,
        folded("Request", () => jsonBlock({ ...params, input: undefined, tools: undefined })),
        folded("Everything as JSON", () => jsonBlock(record))));
  }

  head(row, record, side) {
    const { model } = this;
    const told = record._ng_rollout_seconds ?? {};
    const parts = ["seed", "model", "tools", "verify"].filter((part) => typeof told[part] === "number")
      .map((part) => `${part} ${seconds(told[part])}`).join(", ");
    const facts = [
      row.output_tokens === null ? null : chip(`${plural(row.output_tokens, "token")} out`, "", `${short(row.input_tokens)} in`),
      row.turns === null ? null : chip(plural(row.turns, "turn")),
      row.tool_calls ? chip(plural(row.tool_calls, "call")) : null,
      row.seconds === null ? null : chip(seconds(row.seconds), "", parts || undefined),
      Number.isInteger(record._ng_attempt_index) && record._ng_attempt_index > 0 ? chip(`attempt ${record._ng_attempt_index + 1}`, "warn") : null,
      row.agent ? chip(row.agent) : null,
      chip(`line ${count(row.line)}`, "quiet", row.kind === null ? row.run.file : "of the failures file"),
    ];
    const { rows } = row.task;
    const first = Math.max(0, Math.min(rows.indexOf(row) - SIBLINGS / 2, rows.length - SIBLINGS));
    const siblings = rows.slice(first, first + SIBLINGS).map((other) => el("button", {
      type: "button", class: `sibling ${other.outcome.replace(" ", "-")}`, "aria-pressed": String(other === row),
      title: `rollout ${other.rollout}: ${other.kind ?? rewardText(other.reward)}`,
      on: { click: () => (this.rows.length > 1 ? this.replace(side, other) : model.open(other)) },
    }, `#${other.rollout}`));
    const pair = this.rows.length > 1 ? null : model.pairOf(row);
    return el("header", { class: "rollout-head" },
      el("div", { class: "line" },
        el("button", { type: "button", class: "back", on: { click: () => model.back() } }, "← List"),
        model.runs > 1 ? chip("AB"[row.side], `side-${row.side}`, row.run.file) : null,
        el("h3", {}, taskName(row.task)),
        el("span", { class: "quiet" }, `rollout ${row.rollout}`),
        el("span", { class: `badge ${row.outcome.replace(" ", "-")}` }, badgeText(row))),
      el("div", { class: "line chips" }, facts),
      parts ? el("p", { class: "quiet" }, parts) : null,
      el("div", { class: "line" },
        siblings.length > 1 ? el("div", { class: "siblings", role: "group", "aria-label": "Rollouts of this task" }, siblings,
          rows.length > SIBLINGS ? el("span", { class: "quiet" }, `of ${count(rows.length)}`) : null) : null,
        pair ? el("button", { type: "button", class: "side-by-side", on: { click: () => model.openPair(row) } }, "Side by side") : null,
        this.rows.length > 1 ? el("button", { type: "button", on: { click: () => model.open(row) } }, "Only this one") : null));
  }

  replace(side, row) {
    const rows = [...this.rows];
    rows[side] = row;
    this.show(rows);
  }

  // Marks without touching the document: the browser paints ranges of it.
  highlight() {
    if (!globalThis.Highlight || !CSS.highlights) return;
    CSS.highlights.delete("found");
    if (!this.query) return;
    const ranges = [];
    const needle = this.query.toLowerCase();
    const walker = document.createTreeWalker(this.root, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node && ranges.length < 2000; node = walker.nextNode()) {
      const text = node.data.toLowerCase();
      if (text.length !== node.data.length) continue; // a letter whose small form is longer would shift the marks
      for (let start = text.indexOf(needle); start >= 0; start = text.indexOf(needle, start + needle.length)) {
        const range = new Range();
        range.setStart(node, start);
        range.setEnd(node, start + needle.length);
        ranges.push(range);
      }
    }
    CSS.highlights.set("found", new Highlight(...ranges));
  }
}

function badgeText(row) {
  if (row.kind !== null) return `failed: ${row.kind}`;
  const mark = { passed: "✓ ", "not passed": "✗ ", unscored: "" }[row.outcome];
  return mark + rewardText(row.reward);
}

function section(title, children, whenEmpty = null) {
  const shown = children.filter(Boolean);
  if (!shown.length && !whenEmpty) return null;
  return el("section", { class: "part" }, el("h4", {}, title), shown.length ? shown : el("p", { class: "quiet" }, whenEmpty));
}

function troubles(response) {
  const found = [];
  if (response.error) found.push(el("div", { class: "notice" }, el("strong", {}, "error"), jsonBlock(response.error)));
  if (response.incomplete_details) {
    found.push(el("div", { class: "notice" }, el("strong", {}, "incomplete"), jsonBlock(response.incomplete_details)));
  }
  return found;
}

function failureBox(row, record) {
  return el("div", { class: "notice failure" },
    el("strong", {}, row.kind), record.status ? ` · status ${textOf(record.status)}` : "",
    Number.isInteger(record.attempts) ? ` · ${plural(record.attempts, "attempt")}` : "",
    textBlock(record.reason ? textOf(record.reason) : "no reason is told"));
}

function scoreTable(row, record) {
  const fields = Object.entries(record).filter(([name]) => !FRAMEWORK_FIELDS.has(name) && !name.startsWith("_ng_"));
  const reply = record.reply && typeof record.reply === "object" ? Object.entries(record.reply).filter(([name]) => !FRAMEWORK_FIELDS.has(name)) : [];
  const reward = record.reward === undefined ? [] : [["reward", record.reward]];
  const line = ([name, given]) => el("tr", {}, el("th", { scope: "row" }, name),
    el("td", {}, typeof given === "object" && given !== null ? jsonBlock(given) : textBlock(String(given), "plain")));
  const all = [...reward, ...fields, ...reply];
  return all.length ? el("table", { class: "fields" }, el("tbody", {}, batches(all, line, "field"))) : null;
}

function toolList(tools) {
  return el("div", {}, batches(tools, (tool) => el("div", { class: "tool" },
    el("strong", {}, textOf(tool?.name ?? tool?.function?.name ?? tool?.type ?? "tool")),
    typeof tool?.description === "string" ? textBlock(tool.description, "plain") : null,
    folded("as JSON", () => jsonBlock(tool))), "tool"));
}
