// Numbers, times and lengths of time for people.

import { current, t } from "./i18n.js";

/// What the server does not know is a dash.
export const NONE = "–";

export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  return new Intl.NumberFormat(current(), { maximumFractionDigits: digits }).format(value);
}

/// A count that is exact up to a limit.
export function upTo(value, limit = 10_000) {
  if (value === null || value === undefined) return NONE;
  return value >= limit ? `${number(limit)}+` : number(value);
}

/// Events per second, with as many digits as say something.
export function rate(value) {
  if (value === null || value === undefined) return NONE;
  const digits = value >= 100 || value === 0 ? 0 : value >= 10 ? 1 : 2;
  return t("unit.per_second", { value: number(value, digits) });
}

export function share(value, digits = 2) {
  if (value === null || value === undefined) return NONE;
  return new Intl.NumberFormat(current(), { style: "percent", maximumFractionDigits: digits }).format(value);
}

const STEPS = [
  ["day", 86_400],
  ["hour", 3_600],
  ["minute", 60],
  ["second", 1],
];

/// In words of our own: the browser's are long in Vietnamese.
function unit(value, name, digits = 0) {
  return t(`unit.${name}`, { value: number(value, digits) });
}

/// A length of time in its two largest units: "1h 4m", "350ms".
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1) return value === 0 ? unit(0, "second") : unit(value * 1000, "millisecond", value < 0.01 ? 1 : 0);
  if (value < 10 && !Number.isInteger(value)) return unit(value, "second", 1);
  let rest = Math.round(value);
  const words = [];
  for (const [name, length] of STEPS) {
    const count = Math.floor(rest / length);
    if (count > 0 || (words.length === 1 && name !== "second")) {
      if (count > 0) words.push(unit(count, name));
      rest -= count * length;
      if (words.length === 2) break;
    }
  }
  return words.join(" ");
}

export function millis(value) {
  return value === null || value === undefined ? NONE : seconds(value / 1000);
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1024) return unit(value, "byte");
  return value < 1024 * 1024 ? unit(value / 1024, "kilobyte", 1) : unit(value / 1024 / 1024, "megabyte", 1);
}

/// A time in the reader's zone; today's without the date.
export function time(text) {
  const at = new Date(text);
  if (Number.isNaN(at.getTime())) return String(text);
  const isToday = at.toDateString() === new Date().toDateString();
  const options = isToday
    ? { timeStyle: "medium", hourCycle: "h23" }
    : { dateStyle: "medium", timeStyle: "short", hourCycle: "h23" };
  return new Intl.DateTimeFormat(current(), options).format(at);
}

/// Hours and minutes, or the day where the window is longer than two days.
export function tick(text, isLong) {
  const options = isLong
    ? { month: "short", day: "numeric" }
    : { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return new Intl.DateTimeFormat(current(), options).format(new Date(text));
}

/// The same in UTC, for the title.
export function utc(text) {
  const at = new Date(text);
  return Number.isNaN(at.getTime())
    ? String(text)
    : `${at
        .toISOString()
        .replace("T", " ")
        .replace(/\.000Z$/, "Z")} (UTC)`;
}
