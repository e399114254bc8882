// Small pieces that every page is made of.

import { h } from "../dom.js";
import { NONE, time, utc } from "../format.js";
import { has, t } from "../i18n.js";
import { icon } from "./icon.js";

/// A state as a shape, a colour and a word: `good`, `warn`, `bad`, `idle`, `busy`.
export function badge(kind, text, title) {
  return h("span", { class: `badge ${kind}`, title }, icon(kind), h("span", {}, text));
}

/// A time, local to the reader, with the UTC in its title.
export function when(text) {
  return text ? h("time", { datetime: text, title: utc(text) }, time(text)) : NONE;
}

/// Something from outside that may be long: cut for a list, whole in the title up to a bound.
export function clip(text, length = 160) {
  if (text === null || text === undefined || text === "") return h("span", { class: "faint" }, NONE);
  const characters = [...String(text)];
  if (characters.length <= length) return h("span", { class: "clip" }, text);
  return h(
    "span",
    { class: "clip", title: characters.slice(0, 1000).join("") },
    `${characters.slice(0, length).join("")}…`,
  );
}

/// An identifier.
export function code(text, length = 80) {
  if (text === null || text === undefined || text === "") return h("span", { class: "faint" }, NONE);
  return h("code", {}, clip(text, length));
}

/// Words for something that the server names, or its name.
export function named(prefix, name) {
  const key = `${prefix}.${name}`;
  return has(key) ? t(key) : String(name);
}

/// A text in which `commands` stand between backticks.
export function prose(text) {
  return String(text ?? "")
    .split("`")
    .map((part, index) => (index % 2 === 1 ? h("code", {}, part) : part));
}

/// A text that the server wrote; it writes English.
export function said(text, tag = "span", attributes = {}) {
  return h(tag, { lang: "en", ...attributes }, prose(text));
}

/// Nothing to show, and what that means.
export function empty(text, hint, kind = "good") {
  return h("div", { class: "empty" }, icon(kind), h("p", {}, text), hint && h("p", { class: "faint" }, prose(hint)));
}

/// A failed request.
export function trouble(problem, again) {
  return h(
    "div",
    { class: "trouble", role: "alert", "data-key": "trouble" },
    icon("bad"),
    h("div", {}, said(problem.message, "p"), problem.remedy && said(problem.remedy, "p", { class: "remedy" })),
    again && h("button", { type: "button", onclick: again }, t("act.again")),
  );
}

/// A heading with what can be done beside it.
export function heading(text, ...actions) {
  return h("div", { class: "heading" }, h("h1", { tabindex: "-1" }, text), h("div", { class: "actions" }, actions));
}

/// A part of a page.
export function section(title, ...children) {
  return h("section", { class: "panel", "data-key": `section-${title}` }, h("h2", {}, title), children);
}

/// A choice of few, as links, of which one is current.
export function choice(label, options) {
  return h(
    "nav",
    { class: "choice", "aria-label": label },
    options.map(({ text, href, isCurrent }) => h("a", { href, "aria-current": isCurrent ? "true" : null }, text)),
  );
}

/// Pairs of name and value.
export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

/// The link to the next page of a list, and back to the first.
export function pager(isFirst, first, next) {
  if (isFirst && !next) return null;
  return h(
    "nav",
    { class: "pager", "aria-label": t("list.pages") },
    isFirst ? null : h("a", { class: "button", href: first }, t("list.first")),
    next ? h("a", { class: "button", href: next }, t("list.next")) : h("span", { class: "faint" }, t("list.end")),
  );
}

/// While the first answer is awaited: as high as what will come, so that nothing jumps.
export function loading() {
  return h("div", { class: "loading", "aria-busy": "true" }, h("p", { class: "faint" }, t("list.loading")));
}
