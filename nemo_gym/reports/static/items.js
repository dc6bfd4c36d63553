// The items of a Responses API conversation. What has no shape of its own here is shown as JSON, so nothing is hidden.

const OUTPUT_END = "_output";
const FIELDS_NAMED = 12;
const HIDDEN_FIELDS = new Set(["type", "id", "call_id", "status", "object", "role"]);

const isEmpty = (value) => value === null || value === undefined || value === "" || (Array.isArray(value) && !value.length);

function restOf(value, shown) {
  const rest = Object.entries(value).filter(([name, part]) => !shown.has(name) && !HIDDEN_FIELDS.has(name) && !isEmpty(part));
  // Not by assignment: a field may be called `__proto__`.
  const named = rest.slice(0, FIELDS_NAMED).map(([name]) => name).join(", ");
  const more = rest.length > FIELDS_NAMED ? ` and ${count(rest.length - FIELDS_NAMED)} more` : "";
  return rest.length ? folded(`More fields: ${named}${more}`, () => jsonBlock(Object.fromEntries(rest))) : null;
}

function contentPart(part) {
  if (typeof part === "string") return textBlock(part);
  if (!part || typeof part !== "object") return jsonBlock(part);
  const known = new Set(["text", "refusal", "image_url", "detail"]);
  const pieces = [];
  if (typeof part.text === "string") pieces.push(textBlock(part.text));
  if (typeof part.refusal === "string") pieces.push(el("p", { class: "label" }, "refusal"), textBlock(part.refusal));
  const image = typeof part.image_url === "string" ? part.image_url : part.image_url?.url;
  if (typeof image === "string") pieces.push(imageOrText(image));
  if (!pieces.length) return el("div", {}, el("p", { class: "label" }, textOf(part.type ?? "part")), jsonBlock(part));
  return el("div", {}, pieces, restOf(part, known));
}

function content(value) {
  if (typeof value === "string") return [value ? textBlock(value) : el("p", { class: "quiet" }, "(empty)")];
  if (Array.isArray(value)) return value.length ? batches(value, contentPart, "part") : [el("p", { class: "quiet" }, "(empty)")];
  return value === null || value === undefined ? [] : [jsonBlock(value)];
}

// A tool's result is data more often than prose: JSON in it is set out in lines.
function resultContent(value) {
  if (typeof value === "string") return [value ? codeBlock(value) : el("p", { class: "quiet" }, "(empty)")];
  if (Array.isArray(value)) {
    return batches(value, (part) => (typeof part?.text === "string" ? el("div", {}, codeBlock(part.text), restOf(part, new Set(["text"])))
      : contentPart(part)), "part");
  }
  return value === null || value === undefined ? [] : [jsonBlock(value)];
}

const value = (given) => (typeof given === "string" ? codeBlock(given) : jsonBlock(given));

function labelled(item, fields) {
  const pieces = [];
  for (const name of fields) {
    const given = item[name];
    if (isEmpty(given)) continue;
    if (pieces.length || name === "error") pieces.push(el("p", { class: "label" }, name.replaceAll("_", " ")));
    pieces.push(value(given));
  }
  return pieces;
}

function card(style, title, chips, body) {
  return el("article", { class: `item ${style}` }, el("header", {}, el("strong", {}, title), chips), body);
}

const messageItem = (item) => {
  const role = typeof item.role === "string" ? item.role : "assistant";
  return card(`message role-${/^[a-z]+$/.test(role) ? role : "other"}`, role, [], [
    ...content(item.content), restOf(item, new Set(["content"])),
  ]);
};

const reasoningItem = (item) => {
  const pieces = [];
  const shown = new Set(["summary", "content"]);
  if (!isEmpty(item.summary)) pieces.push(el("p", { class: "label" }, "summary"), ...content(item.summary));
  if (!isEmpty(item.content)) pieces.push(...content(item.content));
  if (typeof item.encrypted_content === "string") {
    shown.add("encrypted_content");
    pieces.push(el("p", { class: "quiet" }, `encrypted, ${count(item.encrypted_content.length)} characters`));
  }
  if (!pieces.length) pieces.push(el("p", { class: "quiet" }, "(empty)"));
  return card("reasoning", "reasoning", [], [...pieces, restOf(item, shown)]);
};

// Of a call or its result: the fields that say what it is about, in the order of reading.
const FIELDS = {
  function_call: ["arguments"],
  custom_tool_call: ["input"],
  mcp_call: ["arguments", "output", "error"],
  mcp_list_tools: ["tools", "error"],
  mcp_approval_request: ["arguments"],
  mcp_approval_response: ["approve", "reason"],
  web_search_call: ["action"],
  file_search_call: ["queries", "results"],
  computer_call: ["action", "actions", "pending_safety_checks"],
  code_interpreter_call: ["code", "outputs"],
  local_shell_call: ["action"],
  shell_call: ["action"],
  apply_patch_call: ["operation"],
  tool_search_call: ["arguments"],
};

function callItem(item) {
  const fields = FIELDS[item.type] ?? ["arguments", "input", "code", "action", "queries"];
  const name = [item.server_label, item.namespace, item.name].filter((part) => !isEmpty(part)).map(textOf).join(".");
  const chips = [chip(item.type === "function_call" ? "call" : item.type)];
  if (typeof item.status === "string" && item.status !== "completed") chips.push(chip(item.status, "warn"));
  const shown = new Set([...fields, "name", "server_label", "namespace"]);
  return card("call", name || item.type, chips, [...labelled(item, fields), restOf(item, shown)]);
}

function outputItem(item, names) {
  const name = names.get(item.call_id);
  const chips = [chip(item.type === "function_call_output" ? "result" : item.type)];
  if (item.call_id !== undefined && name === undefined) chips.push(chip("of no call", "warn", textOf(item.call_id)));
  const shown = new Set(["output"]);
  const screenshot = item.output?.image_url;
  const body = typeof screenshot === "string" ? [imageOrText(screenshot)] : resultContent(item.output);
  return card("result", name ?? "result", chips, [...body, restOf(item, shown)]);
}

function imageItem(item) {
  const image = typeof item.result === "string" ? `data:image/png;base64,${item.result}` : null;
  return card("call", "image generation", [chip(item.type)], [image ? imageOrText(image) : null, restOf(item, new Set(image ? ["result"] : []))]);
}

function unknownItem(item) {
  const kind = item && typeof item === "object" && typeof item.type === "string" ? item.type : "item";
  return card("unknown", kind, [chip("shown as JSON")], [jsonBlock(item)]);
}

function conversationItem(item, names) {
  if (typeof item === "string") return messageItem({ role: "user", content: item });
  if (!item || typeof item !== "object" || Array.isArray(item)) return unknownItem(item);
  const kind = item.type ?? (item.role ? "message" : undefined);
  if (kind === "message") return messageItem(item);
  if (kind === "reasoning") return reasoningItem(item);
  if (kind === "image_generation_call") return imageItem(item);
  if (typeof kind !== "string") return unknownItem(item);
  if (kind.endsWith(OUTPUT_END)) return outputItem(item, names);
  if (kind.endsWith("_call") || Object.hasOwn(FIELDS, kind)) return callItem(item);
  return unknownItem(item);
}

function callNames(items) {
  const names = new Map();
  for (const item of items) {
    if (item?.call_id !== undefined && typeof item.type === "string" && !item.type.endsWith(OUTPUT_END)) {
      names.set(item.call_id, isEmpty(item.name) ? item.type : textOf(item.name));
    }
  }
  return names;
}
