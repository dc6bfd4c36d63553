// Numbers and times as people read them. What is not known is a dash.

export const UNKNOWN = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** Returns a count, such as 12,345. */
export function count(value) {
  return known(value) ? whole.format(value) : UNKNOWN;
}

/** Returns a count in few characters, such as 12.3K. */
export function short(value) {
  if (!known(value)) return UNKNOWN;
  return Math.abs(value) < 10000 ? whole.format(value) : compact.format(value);
}

/** Returns a number with about three digits. */
export function number(value) {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size >= 1000) return short(value);
  const digits = size === 0 || size >= 100 ? 0 : size >= 10 ? 1 : 2;
  return value.toFixed(digits);
}

/** Returns a reward, with three decimals. */
export function reward(value) {
  return known(value) ? value.toFixed(3) : UNKNOWN;
}

/** Returns milliseconds as a length of time. */
export function milliseconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value >= 10000) return `${(value / 1000).toFixed(0)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 10 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
}

/** Returns an amount of memory. */
export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  if (value >= 2 ** 30) return `${(value / 2 ** 30).toFixed(1)} GiB`;
  return `${(value / 2 ** 20).toFixed(0)} MiB`;
}

/** Returns a part of one as a percentage. */
export function percent(value) {
  return known(value) ? `${Math.round(value * 100)} %` : UNKNOWN;
}

/** Returns seconds as a length of time in one or two units, such as 2 h 5 min. */
export function duration(seconds) {
  if (!known(seconds) || seconds < 0) return UNKNOWN;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 10) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

/** Returns unix seconds as a time of day, with seconds. */
export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

/** Returns unix seconds as a time of day, without seconds. */
export function minute(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}

/** Returns a count with its noun: 1 worker, 2 workers. */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}
