// Asks the head server for its figures again and again, and shows them; says so when it does not answer.

import { setAttribute, setText } from "./dom.js";
import { clock } from "./format.js";
import { Events, OverTime, Tiles, Verdict } from "./overview.js";
import { Runs } from "./runs.js";
import { Servers } from "./servers.js";

const EVERY_MS = 1500;
const LOST_EVERY_MS = 2000;
const TIMEOUT_MS = 5000;
const STILL_AFTER_MS = 30000;
const NOTICE_MS = 15000;

const byId = (id) => document.getElementById(id);
const views = [new Verdict(), new Tiles(), new Runs(), new OverTime(), new Servers(), new Events()];

const state = { tag: null, shown: null, lostSince: null, changedAt: 0, paused: false, broken: false, wake: () => {} };

function show(data) {
  const before = state.shown?.deployment;
  state.shown = data;
  const { head_url: url, working_dir: folder, started_at: startedAt } = data.deployment;
  setText(byId("where"), `${url}, since ${clock(startedAt)}, in ${folder}`);
  if (before && before.id !== data.deployment.id) notice(`Another deployment answers at this address, started at ${clock(startedAt)}.`);
  for (const view of views) view.update(data);
}

function live(name, text) {
  setAttribute(byId("live"), "data-state", name);
  setText(byId("live"), text);
}

function banner(text, level) {
  const element = byId("banner");
  setAttribute(element, "data-level", level);
  setText(element, text);
  element.hidden = text === "";
}

function notice(text) {
  banner(text, "note");
  setTimeout(() => byId("banner").textContent === text && banner("", "note"), NOTICE_MS);
}

function lost(why) {
  live("lost", "not connected");
  document.body.classList.add("stale");
  if (state.lostSince !== null) return;
  state.lostSince = Date.now() / 1000;
  const kept = state.shown ? ` The figures below are of ${clock(state.shown.at)}.` : "";
  banner(`The head server does not answer since ${clock(state.lostSince)} (${why}): the deployment has ended, or can't be reached.${kept} Trying again every ${LOST_EVERY_MS / 1000} seconds.`, "error");
}

function found() {
  document.body.classList.remove("stale");
  if (state.lostSince !== null) {
    state.lostSince = null;
    notice("The head server answers again.");
  }
}

/** Says so when the page itself fails: one that stands still must not look like one that is up to date. */
function broken(error) {
  console.error(error);
  state.broken = true;
  state.tag = null;
  live("lost", "can't be shown");
  document.body.classList.add("stale");
  banner(`This page can't show what the head server says (${error.message}). Reload it; where that does not help, gym env status shows the same in a terminal.`, "error");
}

async function ask() {
  const headers = state.tag === null ? {} : { "If-None-Match": state.tag };
  const reply = await fetch("dashboard/data", { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (reply.status === 304) return null;
  if (!reply.ok) throw new Error(`it answered ${reply.status}`);
  const data = await reply.json();
  if (!data.deployment) throw new Error("something else answered");
  return { data, tag: reply.headers.get("ETag") };
}

function reason(error) {
  if (error.name === "TimeoutError") return `nothing in ${TIMEOUT_MS / 1000} s`;
  if (error instanceof SyntaxError) return "something else answered";
  return error instanceof TypeError ? "no connection" : error.message;
}

async function look() {
  let news;
  try {
    news = await ask();
  } catch (error) {
    if (!state.paused) lost(reason(error));
    return;
  }
  // The pause may have begun while the answer was under way.
  if (state.paused) return;
  found();
  if (news !== null) {
    state.changedAt = performance.now();
    try {
      show(news.data);
      state.tag = news.tag;
    } catch (error) {
      broken(error);
      return;
    }
    if (state.broken) banner("", "note");
    state.broken = false;
  }
  const isStill = performance.now() - state.changedAt > STILL_AFTER_MS;
  live(isStill ? "still" : "live", isStill ? `standing still since ${clock(state.shown.at)}` : `live, ${clock(state.shown.at)}`);
}

function pause() {
  state.paused = !state.paused;
  setAttribute(byId("pause"), "aria-pressed", state.paused);
  if (state.paused) live("paused", state.shown ? `paused at ${clock(state.shown.at)}` : "paused");
  state.wake();
}

async function run() {
  byId("pause").addEventListener("click", pause);
  document.addEventListener("visibilitychange", () => state.wake());
  for (;;) {
    if (!state.paused && !document.hidden) await look();
    await new Promise((resolve) => {
      state.wake = resolve;
      setTimeout(resolve, state.lostSince === null ? EVERY_MS : LOST_EVERY_MS);
    });
  }
}

run();
