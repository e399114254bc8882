// Short messages about what was done; read out, and gone after a while.

import { h } from "../dom.js";
import { icon } from "./icon.js";

const STAYS_MS = 6_000;
const AT_ONCE_MAX = 4;

const place = h("div", { class: "toasts", role: "status", "aria-live": "polite" });

/// Where they appear.
export function toasts() {
  return place;
}

export function toast(text, kind = "good") {
  const message = h("div", { class: `toast ${kind}` }, icon(kind), h("span", {}, text));
  place.append(message);
  while (place.children.length > AT_ONCE_MAX) place.firstChild.remove();
  setTimeout(() => message.remove(), STAYS_MS);
}
