// Words and figures in the reader's language.

import en from "./i18n/en.js";
import vi from "./i18n/vi.js";

export const LANGUAGES = { en: "English", vi: "Tiếng Việt" };
const WORDS = { en, vi };
const KEPT_AS = "postrider.language";

let language = "en";
let plurals = new Intl.PluralRules("en");

/// Chooses the language: what was chosen before, else what the browser asks for.
export function begin() {
  const kept = remembered();
  const asked = navigator.languages ?? [navigator.language];
  const found = asked.map((name) => name.slice(0, 2).toLowerCase()).find((name) => name in WORDS);
  use(kept in WORDS ? kept : (found ?? "en"));
}

/// Takes a language and remembers it.
export function choose(name) {
  use(name);
  try {
    localStorage.setItem(KEPT_AS, name);
  } catch {
    // Then it holds until the page is left.
  }
}

export function current() {
  return language;
}

function use(name) {
  language = name;
  plurals = new Intl.PluralRules(name);
  document.documentElement.lang = name;
}

function remembered() {
  try {
    return localStorage.getItem(KEPT_AS);
  } catch {
    return null;
  }
}

/// Whether there are words for a key.
export function has(key) {
  return key in WORDS[language];
}

/// The words for a key. `{name}` in them is replaced; where they differ by number, `count` chooses.
export function t(key, values = {}) {
  const words = WORDS[language][key] ?? en[key] ?? key;
  const text = typeof words === "string" ? words : (words[plurals.select(values.count ?? 0)] ?? words.other);
  return text.replace(/\{(\w+)\}/g, (whole, name) => {
    const value = values[name];
    if (value === undefined) return whole;
    return typeof value === "number" ? new Intl.NumberFormat(language).format(value) : String(value);
  });
}
