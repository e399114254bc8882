// Dead letters: what was given up, by whom and why; replay and discard, one or many.

import { get, query } from "../api.js";
import { h } from "../dom.js";
import { number } from "../format.js";
import { t } from "../i18n.js";
import { discard, listOf, replay, selection } from "../parts/decide.js";
import { field } from "../parts/dialog.js";
import { replayPanel } from "../parts/replays.js";
import { table } from "../parts/table.js";
import { badge, clip, code, empty, heading, loading, pager, when } from "../parts/words.js";

const FILTERS = ["consumer", "error", "type", "key", "tenant", "stage", "since", "until"];
const LIMIT = 50;
const EVERY_MS = 5_000;
// A replay that ended is shown for this long.
const ENDED_SHOWN_MS = 10 * 60_000;

export function dead(ctx) {
  const filter = Object.fromEntries(FILTERS.map((name) => [name, ctx.params.get(name) ?? ""]));
  const after = ctx.params.get("after") ?? "";
  const seen = { list: null, stats: null, replays: new Map(), chosen: new Set(), hidden: new Set() };
  const draw = () => ctx.show(page(ctx, seen, filter, after, draw, load));
  const load = async () => {
    const wanted = query({ ...filter, after, limit: LIMIT });
    const [list, stats] = await Promise.all([
      get(`/dead-letters${wanted}`, ctx.signal),
      get("/dead-letters/stats", ctx.signal),
    ]);
    Object.assign(seen, { list, stats: stats.items });
    const listed = new Set(list.items.filter(isDead).map((letter) => letter.id));
    seen.chosen = new Set([...seen.chosen].filter((id) => listed.has(id)));
    draw();
  };
  ctx.on("replay", (replay) => {
    const isNew = seen.replays.get(replay.id)?.state !== replay.state;
    seen.replays.set(replay.id, replay);
    draw();
    // It began or ended: the list has changed.
    if (isNew) ctx.attempt(load);
  });
  ctx.attempt(async () => {
    const { items } = await get("/dead-letters/replays", ctx.signal);
    for (const item of items) if (!seen.replays.has(item.id)) seen.replays.set(item.id, item);
    draw();
  });
  ctx.every(EVERY_MS, load);
  draw();
}

function isDead(letter) {
  return letter.state === "dead";
}

function page(ctx, seen, filter, after, draw, load) {
  const began = async (id) => {
    seen.chosen.clear();
    seen.replays.set(id, await get(`/dead-letters/replays/${encodeURIComponent(id)}`));
    draw();
    ctx.attempt(load);
  };
  const hide = (gone) => {
    seen.hidden.add(gone.id);
    draw();
  };
  const isShown = (replay) =>
    !seen.hidden.has(replay.id) &&
    (replay.state === "running" || Date.now() - new Date(replay.ended_at) < ENDED_SHOWN_MS);
  const replays = [...seen.replays.values()].filter(isShown).sort((one, other) => (one.id < other.id ? 1 : -1));
  return [
    heading(t("nav.dead"), seen.list && ctx.canAct ? actions(ctx, seen, filter, began, load) : null),
    replayPanel(replays, ctx.canAct, hide),
    seen.stats ? groups(seen.stats) : null,
    filters(filter, seen.stats ?? []),
    seen.list ? list(ctx, seen, filter, after, draw) : loading(),
  ];
}

/// Those that were chosen or, when none is, all that the filter names.
function actions(ctx, seen, filter, began, load) {
  const ids = [...seen.chosen];
  const isSome = ids.length > 0;
  const which = isSome ? { ids } : selection(filter);
  const count = isSome ? ids.length : matching(seen.stats, filter);
  const done = () => {
    seen.chosen.clear();
    ctx.attempt(load);
  };
  const isNone = !isSome && !seen.list.items.some(isDead);
  const label = (verb) => (isSome ? t(`${verb}.chosen`, { count: ids.length }) : t(`${verb}.matching`));
  return [
    h(
      "button",
      {
        type: "button",
        class: "primary",
        disabled: isNone,
        "data-key": "replay",
        onclick: () => replay(which, count, began),
      },
      label("replay"),
    ),
    h(
      "button",
      {
        type: "button",
        class: "danger",
        disabled: isNone,
        "data-key": "discard",
        onclick: () => discard(which, count, done),
      },
      label("discard"),
    ),
  ];
}

/// How many the filter names, where the counts say so; null otherwise.
function matching(stats, filter) {
  if (filter.type || filter.key || filter.tenant || filter.since || filter.until) return null;
  return stats
    .filter((item) => item.state === "dead")
    .filter(
      (item) =>
        (!filter.consumer || item.consumer === filter.consumer) && (!filter.error || item.error_type === filter.error),
    )
    .filter((item) => !filter.stage || item.stage === filter.stage)
    .reduce((sum, item) => sum + item.count, 0);
}

/// Where most of them are, each a way to filter.
function groups(stats) {
  const open = stats
    .filter((item) => item.state === "dead")
    .sort((one, other) => other.count - one.count)
    .slice(0, 6);
  if (open.length === 0) return null;
  return h(
    "ul",
    { class: "groups", "data-key": "groups" },
    open.map((item) =>
      h(
        "li",
        { "data-key": `${item.consumer} ${item.error_type}` },
        h(
          "a",
          { href: listOf({ consumer: item.consumer, error: item.error_type }) },
          h("b", {}, number(item.count)),
          h("span", {}, clip(item.consumer, 40)),
          h("span", { class: "faint" }, clip(item.error_type, 40), " · ", t("dead.since"), " ", when(item.oldest)),
        ),
      ),
    ),
  );
}

function filters(filter, stats) {
  const text = (name, from) => {
    const names = from ? [...new Set(stats.map((item) => item[from]))] : [];
    return field(t(`filter.${name}`), [
      h("input", {
        type: "text",
        name,
        value: filter[name],
        autocomplete: "off",
        spellcheck: "false",
        list: from ? `list-${name}` : null,
      }),
      from
        ? h(
            "datalist",
            { id: `list-${name}` },
            names.map((value) => h("option", { value })),
          )
        : null,
    ]);
  };
  const isSet = FILTERS.some((name) => filter[name]);
  const isOpen = isSet || matchMedia("(min-width: 761px)").matches;
  const form = h(
    "form",
    {
      class: "filters",
      role: "search",
      onsubmit: (event) => {
        event.preventDefault();
        const given = Object.fromEntries(new FormData(event.target));
        for (const name of ["since", "until"]) if (given[name]) given[name] = new Date(given[name]).toISOString();
        location.hash = listOf(given).slice(1);
      },
    },
    text("consumer", "consumer"),
    text("error", "error_type"),
    text("type"),
    text("key"),
    text("tenant"),
    field(
      t("filter.stage"),
      h(
        "select",
        { name: "stage" },
        ["", "consumer", "relay"].map((value) =>
          h("option", { value, selected: value === filter.stage }, t(`stage.${value || "any"}`)),
        ),
      ),
    ),
    ["since", "until"].map((name) =>
      field(t(`filter.${name}`), h("input", { type: "datetime-local", name, value: local(filter[name]) })),
    ),
    h(
      "div",
      { class: "buttons" },
      h("button", { type: "submit" }, t("act.filter")),
      isSet ? h("a", { class: "button", href: "#/dead" }, t("act.clear")) : null,
    ),
  );
  return h(
    "details",
    { class: "filtering", open: isOpen, "data-key": "filters" },
    h("summary", {}, t("act.filter")),
    form,
  );
}

/// A time as the field wants it, in the reader's zone.
function local(text) {
  const at = new Date(text);
  if (!text || Number.isNaN(at.getTime())) return "";
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

function list(ctx, seen, filter, after, draw) {
  const { items, next } = seen.list;
  if (items.length === 0) {
    const isFiltered = FILTERS.some((name) => filter[name]) || after;
    return isFiltered
      ? empty(t("dead.none_match"), t("dead.none_match_hint"), "idle")
      : empty(t("dead.none"), t("dead.none_hint"));
  }
  const dead = items.filter(isDead);
  const columns = [
    {
      label: t("dead.number"),
      is: "number",
      cell: (letter) => h("a", { href: `#/dead/${letter.id}` }, `#${letter.id}`),
    },
    {
      label: t("dead.consumer"),
      cell: (letter) => h("a", { href: listOf({ consumer: letter.consumer }) }, clip(letter.consumer, 60)),
    },
    {
      label: t("dead.error"),
      is: "wide",
      cell: (letter) => [
        h("b", {}, clip(letter.error_type, 60)),
        h("span", { class: "text" }, clip(letter.error, 200)),
      ],
    },
    { label: t("dead.type"), cell: (letter) => code(letter.type ?? letter.topic, 60) },
    { label: t("dead.key"), cell: (letter) => code(letter.key, 40) },
    { label: t("dead.attempts"), is: "number", cell: (letter) => number(letter.attempts) },
    { label: t("dead.died"), cell: (letter) => when(letter.died_at) },
    { label: t("dead.state"), cell: state },
  ];
  if (ctx.canAct) columns.unshift(ticks(seen, dead, draw));
  return h(
    "section",
    { class: "panel", "data-key": "list" },
    table({ caption: t("nav.dead"), key: (letter) => letter.id, rows: items, columns }),
    pager(!after, listOf(filter), next ? listOf({ ...filter, after: next }) : null),
  );
}

function ticks(seen, dead, draw) {
  const areAll = dead.length > 0 && dead.every((letter) => seen.chosen.has(letter.id));
  const tick = (id, isOn) => {
    if (isOn) seen.chosen.add(id);
    else seen.chosen.delete(id);
  };
  return {
    label: t("dead.choose"),
    is: "tick",
    hint: t("dead.choose_all"),
    head: h("input", {
      type: "checkbox",
      checked: areAll,
      "aria-label": t("dead.choose_all"),
      onchange: (event) => {
        for (const letter of dead) tick(letter.id, event.target.checked);
        draw();
      },
    }),
    cell: (letter) =>
      isDead(letter)
        ? h("input", {
            type: "checkbox",
            checked: seen.chosen.has(letter.id),
            "aria-label": t("dead.choose_one", { id: letter.id }),
            onchange: (event) => {
              tick(letter.id, event.target.checked);
              draw();
            },
          })
        : null,
  };
}

/// A dead letter's state in a word.
export function state(letter) {
  const kind = { dead: "idle", replaying: "busy", discarded: "idle" }[letter.state] ?? "idle";
  return badge(kind, t(`state.${letter.state}`));
}
