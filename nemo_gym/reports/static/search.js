// Search through the texts of all rollouts, block by block, with the page left free in between.

const WORK_MS = 12;
const BEFORE = 12;
const BEHIND = 120;
const NO_TEXTS = new Set(["type", "role", "status", "object"]);

const breath = () => new Promise((resolve) => {
  const channel = new MessageChannel();
  channel.port1.onmessage = () => {
    channel.port1.close();
    resolve();
  };
  channel.port2.postMessage(null);
});

function* textsIn(value, key) {
  if (typeof value === "string") {
    if (!NO_TEXTS.has(key)) yield value;
  } else if (Array.isArray(value)) {
    for (const part of value) yield* textsIn(part, "");
  } else if (value && typeof value === "object") {
    for (const [name, part] of Object.entries(value)) yield* textsIn(part, name);
  }
}

function snippet(text, at, length) {
  const start = Math.max(0, at - BEFORE);
  const shown = text.slice(start, at + length + BEHIND).replace(/\s+/g, " ");
  return (start ? "…" : "") + shown;
}

function findIn(record, needle) {
  for (const text of textsIn(record, "")) {
    const at = text.toLowerCase().indexOf(needle);
    if (at >= 0) return snippet(text, at, needle.length);
  }
  return null;
}

class Search {
  constructor(rows) {
    this.blocks = new Map();
    for (const row of rows) {
      if (!this.blocks.has(row.block)) this.blocks.set(row.block, []);
      this.blocks.get(row.block).push(row);
    }
    this.turn = 0;
  }

  stop() {
    this.turn += 1;
  }

  // Calls `tell(found, done, total)` while it goes, with a Map from row to snippet; ends early when another begins.
  async run(query, tell) {
    this.stop();
    const turn = this.turn;
    const needle = query.toLowerCase();
    const asJson = JSON.stringify(needle).slice(1, -1);
    const found = new Map();
    let done = 0;
    let began = performance.now();
    for (const [number, rows] of this.blocks) {
      const packed = await packedText(`block-${number}`);
      const lines = (await unpack(packed)).split("\n");
      for (const row of rows) {
        // The line as it stands says at once where there is nothing; only its strings are texts.
        if (lines[row.place].toLowerCase().includes(asJson)) {
          const text = findIn(JSON.parse(lines[row.place]), needle);
          if (text !== null) found.set(row, text);
        }
        if (performance.now() - began > WORK_MS) {
          await breath();
          began = performance.now();
        }
        if (turn !== this.turn) return;
      }
      done += 1;
      tell(found, done, this.blocks.size);
    }
    if (!this.blocks.size) tell(found, 0, 0);
  }
}
