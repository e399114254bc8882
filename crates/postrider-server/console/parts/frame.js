// The frame: menu, who is there, whether it is live, language and theme.

import { remove } from "../api.js";
import { h } from "../dom.js";
import { upTo } from "../format.js";
import { current as language, LANGUAGES, t } from "../i18n.js";
import { icon } from "./icon.js";
import { toast } from "./toast.js";
import { badge } from "./words.js";

const PLACES = ["overview", "outbox", "consumers", "dead", "errors", "alerts", "integrity", "audit", "health"];
const THEMES = ["auto", "light", "dark"];

let isMenuOpen = false;

/// What stands above and beside the pages.
export function frame({ session, current, overview, connection, choose, redraw, leave }) {
  const setMenu = (isOpen) => {
    isMenuOpen = isOpen;
    redraw();
  };
  return [
    h("a", { class: "skip", href: "#main", onclick: skip }, t("frame.skip")),
    h(
      "header",
      {},
      h(
        "a",
        { class: "brand", href: "#/" },
        h("img", { src: "/console/icon.svg", alt: "", width: 22, height: 22 }),
        "Postrider",
      ),
      h(
        "button",
        {
          type: "button",
          class: "menu",
          "aria-expanded": String(isMenuOpen),
          "aria-controls": "menu",
          onclick: () => setMenu(!isMenuOpen),
        },
        icon("menu"),
        h("span", {}, t("frame.menu")),
      ),
      h("div", { class: "state", role: "status" }, connected(connection)),
      h(
        "nav",
        {
          id: "menu",
          class: isMenuOpen ? "open" : null,
          "aria-label": t("frame.menu"),
          onclick: () => isMenuOpen && setMenu(false),
          onkeydown: (event) => event.key === "Escape" && isMenuOpen && setMenu(false),
        },
        PLACES.map((name) =>
          h(
            "a",
            { href: name === "overview" ? "#/" : `#/${name}`, "aria-current": name === current ? "page" : null },
            icon(name),
            h("span", {}, t(`nav.${name}`)),
            count(name, overview),
          ),
        ),
        settings(session, choose, redraw, leave),
      ),
    ),
  ];
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function connected(connection) {
  const kind = { live: "good", polling: "warn", lost: "bad" }[connection] ?? "idle";
  return badge(kind, t(`live.${connection}`), t(`live.${connection}.title`));
}

/// What waits for a person, beside the name of its page.
function count(name, overview) {
  if (!overview) return null;
  if (name === "dead") {
    // An adopted table keeps what failed itself; it has no dead letters.
    const failed = overview.outboxes.reduce(
      (sum, outbox) => sum + (outbox.table ? 0 : (outbox.backlog?.failed ?? 0)),
      0,
    );
    const dead = overview.consumers.reduce((sum, consumer) => sum + consumer.dead, failed);
    return dead > 0 ? h("span", { class: "count" }, upTo(dead)) : null;
  }
  if (name !== "alerts") return null;
  const open = overview.alerts.filter((alert) => !alert.silenced);
  const isBad = open.some((alert) => alert.urgency === "critical");
  return open.length > 0 ? h("span", { class: isBad ? "count bad" : "count warn" }, upTo(open.length, 100)) : null;
}

function settings(session, choose, redraw, leave) {
  return h(
    "div",
    { class: "settings" },
    h(
      "p",
      { class: "who" },
      h("span", {}, t(`role.${session.role}`), " ", h("b", {}, session.name)),
      session.csrf
        ? h("button", { type: "button", class: "quiet", onclick: () => signOut(leave) }, t("act.sign_out"))
        : null,
    ),
    h(
      "label",
      { class: "field" },
      h("span", {}, t("frame.language")),
      h(
        "select",
        { onclick: (event) => event.stopPropagation(), onchange: (event) => choose(event.target.value) },
        Object.entries(LANGUAGES).map(([code, name]) =>
          h("option", { value: code, lang: code, selected: code === language() }, name),
        ),
      ),
    ),
    h(
      "label",
      { class: "field" },
      h("span", {}, t("frame.theme")),
      h(
        "select",
        {
          onclick: (event) => event.stopPropagation(),
          onchange: (event) => {
            setTheme(event.target.value);
            redraw();
          },
        },
        THEMES.map((name) => h("option", { value: name, selected: name === theme() }, t(`theme.${name}`))),
      ),
    ),
    h("p", { class: "faint" }, t("frame.version", { version: session.version })),
  );
}

function theme() {
  return document.documentElement.dataset.theme ?? "auto";
}

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("postrider.theme", name);
  } catch {
    // Then it holds until the page is left.
  }
}

async function signOut(leave) {
  try {
    await remove("/session");
  } catch (problem) {
    toast(problem.message, "bad");
  }
  leave();
}
