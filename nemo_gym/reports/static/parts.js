// Small pieces of the page. Texts go in as text nodes and never as HTML.

const LONG_TEXT = 6000;
const LONG_LINES = 80;
const ITEMS_AT_ONCE = 200;
const DEEPEST = 40;
const SAFE_IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+$/;

function el(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== "") element.append(child);
  return element;
}

const at = (id) => document.getElementById(id);

// What should be a text but may be anything: an object with a member `toString` can't be made one otherwise.
const textOf = (value) => (typeof value === "string" ? value : JSON.stringify(value) ?? "");

// Lists of thousands are shown a few hundred at a time. `make` returns an element.
function batches(items, make, word, from = 0) {
  const shown = items.slice(from, from + ITEMS_AT_ONCE).map(make);
  const left = items.length - from - shown.length;
  if (left > 0) {
    const more = el("button", { type: "button", class: "more" }, `Show ${count(Math.min(left, ITEMS_AT_ONCE))} of ${plural(left, `more ${word}`)}`);
    more.addEventListener("click", () => {
      const parent = more.parentElement;
      more.replaceWith(...batches(items, make, word, from + ITEMS_AT_ONCE));
      parent.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
    });
    shown.push(more);
  }
  return shown;
}

function textBlock(text, style = "") {
  const block = el("div", { class: `text ${style}` });
  const lines = text.split("\n", LONG_LINES + 1);
  if (text.length <= LONG_TEXT && lines.length <= LONG_LINES) {
    block.textContent = text;
    return block;
  }
  const cut = Math.min(LONG_TEXT, lines.slice(0, LONG_LINES).join("\n").length);
  const start = document.createTextNode(text.slice(0, cut));
  const more = el("button", { type: "button", class: "more" }, `Show all ${count(text.length)} characters`);
  more.addEventListener("click", () => {
    start.data = text;
    more.remove();
    block.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
  });
  block.append(start, more);
  return block;
}

function imageOrText(address) {
  if (SAFE_IMAGE.test(address)) return el("img", { src: address, alt: "an image of the conversation", loading: "lazy" });
  return textBlock(address, "code");
}

// JSON text on several lines, every character of it kept: parsing and writing it again would round numbers.
function indented(text) {
  let out = "";
  let depth = 0;
  const indent = () => "  ".repeat(Math.min(depth, DEEPEST));
  let inString = false;
  for (let i = 0; i < text.length; i += 1) {
    const c = text[i];
    if (inString) {
      out += c;
      if (c === "\\") out += text[(i += 1)] ?? "";
      else if (c === '"') inString = false;
    } else if (c === '"') {
      inString = true;
      out += c;
    } else if (c === "{" || c === "[") {
      const rest = text.slice(i + 1, i + 40).trimStart();
      if (rest[0] === "}" || rest[0] === "]") {
        out += c + rest[0];
        i = text.indexOf(rest[0], i + 1);
      } else {
        depth += 1;
        out += `${c}\n${indent()}`;
      }
    } else if (c === "}" || c === "]") {
      depth -= 1;
      out += `\n${indent()}${c}`;
    } else if (c === ",") out += `,\n${indent()}`;
    else if (c === ":") out += ": ";
    else if (!/\s/.test(c)) out += c;
  }
  return out;
}

function codeBlock(text) {
  const start = text.trimStart()[0];
  if ((start === "{" || start === "[") && text.length < 200000) {
    try {
      JSON.parse(text);
      return textBlock(text.length < 140 ? text : indented(text), "code");
    } catch {
      // Not JSON: shown as it is.
    }
  }
  return textBlock(text, "code");
}

const jsonBlock = (value) => textBlock(JSON.stringify(value, null, 2) ?? "", "code");

function folded(summary, makeContent, open = false) {
  const box = el("details", { class: "folded" }, el("summary", {}, summary));
  const fill = () => {
    if (box.open && box.childElementCount === 1) box.append(makeContent());
  };
  box.addEventListener("toggle", fill);
  if (open) {
    box.open = true;
    fill();
  }
  return box;
}

function chip(text, style = "", title = undefined) {
  return el("span", { class: `chip ${style}`, title }, text);
}

const count = (value) => value.toLocaleString("en-US");
const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

// Rounded, but to no whole number as long as a few more digits tell that it is none: nearly all is not all.
function nearly(value, digits) {
  let near = Number(value.toPrecision(digits));
  for (let more = digits + 1; more <= 7 && Number.isInteger(near) && near !== value; more += 1) near = Number(value.toPrecision(more));
  return near;
}

function percent(value) {
  const near = Number((100 * value).toPrecision(3));
  return `${near === 100 ? nearly(100 * value, 3) : near} %`;
}

function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return count(value);
  const size = Math.abs(value);
  if (size >= 10 ** digits && size < 1e15) return count(Math.round(value));
  return String(Number(value.toPrecision(digits)));
}

const seconds = (value) => {
  if (value === null) return "–";
  if (value < 1) return `${short(1000 * value)} ms`;
  return value < 120 ? `${short(value)} s` : `${short(value / 60)} min`;
};
const signed = (text, value) => (value > 0 ? `+${text}` : text.replace("-", "−"));
const reward = (value) => (Math.abs(value) < 1e4 ? short(nearly(value, 4), 7) : short(value, 4));
const rewardText = (value) => (value === null ? "no reward" : reward(value));

function taskName(task) {
  const name = task.index >= 0 ? `task ${task.index}` : "task";
  return task.label ? `${name} · ${task.label}` : name;
}
