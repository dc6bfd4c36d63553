// What the file holds: facts up front, and blocks of rollouts that are opened when they are needed.

const BLOCKS_KEPT = 24;

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  return bytes;
}

async function unpack(base64) {
  const stream = new Blob([bytesOf(base64.trim())]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

const wholePage = new Promise((resolve) => {
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", resolve, { once: true });
  else resolve();
});

async function packedText(id) {
  // An element with nothing behind it may still be arriving.
  if (!document.getElementById(id)?.nextElementSibling) await wholePage;
  const found = document.getElementById(id);
  if (!found) throw new Error(`this file is not whole: its part ${id} is missing`);
  return found.textContent;
}

const keptBlocks = new Map();

function blockLines(number) {
  const kept = keptBlocks.get(number) ?? packedText(`block-${number}`).then(unpack).then((text) => text.split("\n"));
  keptBlocks.delete(number);
  keptBlocks.set(number, kept);
  if (keptBlocks.size > BLOCKS_KEPT) keptBlocks.delete(keptBlocks.keys().next().value);
  return kept;
}

async function recordOf(row) {
  return JSON.parse((await blockLines(row.block))[row.place]);
}

// One object per rollout from the columns of the index.
function rowsOf(facts) {
  const rows = [];
  facts.runs.forEach((run, side) => {
    const columns = run.rollouts;
    run.tasks.forEach((task) => Object.assign(task, { side, rows: [] }));
    for (let at = 0; at < columns.task.length; at += 1) {
      const row = { side, at, run, task: run.tasks[columns.task[at]] };
      for (const name of ["rollout", "line", "block", "place", "reward", "input_tokens", "output_tokens", "total_tokens",
        "characters", "turns", "tool_calls", "seconds", "answer"]) row[name] = columns[name][at];
      row.kind = columns.kind[at] < 0 ? null : run.kinds[columns.kind[at]];
      row.agent = run.agents[columns.agent[at]];
      row.outcome = outcomeOf(row, facts.threshold);
      row.task.rows.push(row);
      rows.push(row);
    }
    for (const task of run.tasks) task.rows.sort((a, b) => a.rollout - b.rollout || a.at - b.at);
  });
  return rows;
}

function outcomeOf(row, threshold) {
  if (row.kind !== null) return "failed";
  if (row.reward === null) return "unscored";
  return row.reward >= threshold ? "passed" : "not passed";
}
