// Errors by type and by who made them, how often, and whether it gets better.

import { get } from "../api.js";
import { h } from "../dom.js";
import { NONE, number, share } from "../format.js";
import { t } from "../i18n.js";
import { chart } from "../parts/chart.js";
import { listOf } from "../parts/decide.js";
import { icon } from "../parts/icon.js";
import { table } from "../parts/table.js";
import { choice, code, empty, heading, loading, named, section } from "../parts/words.js";

const WINDOWS = ["hour", "day", "month"];
const EVERY_MS = 15_000;

export function errors(ctx) {
  const span = WINDOWS.includes(ctx.params.get("window")) ? ctx.params.get("window") : "hour";
  let seen = null;
  const options = WINDOWS.map((name) => ({
    text: t(`window.${name}`),
    href: name === "hour" ? "#/errors" : `#/errors?window=${name}`,
    isCurrent: name === span,
  }));
  const head = () => heading(t("nav.errors"), choice(t("window.label"), options));
  const draw = () => ctx.show(head(), seen ? page(seen, span, draw) : loading());
  ctx.every(EVERY_MS, async () => {
    seen = await get(`/errors?window=${span}`, ctx.signal);
    draw();
  });
  draw();
}

function page(seen, span, redraw) {
  return [
    h(
      "div",
      { class: "cards", "data-key": "cards" },
      card(
        t("errors.total"),
        number(seen.total),
        trend(seen.total, seen.total_before),
        before(span, seen.total_before, number(seen.total_before)),
      ),
      card(
        t("errors.rate"),
        share(seen.rate),
        trend(seen.rate, seen.rate_before),
        before(span, seen.rate_before, share(seen.rate_before)),
      ),
    ),
    h(
      "div",
      { class: "charts one", "data-key": "charts" },
      chart({
        id: "error-trend",
        title: t("errors.trend"),
        at: seen.at,
        format: (value) => number(value),
        redraw,
        lines: [{ name: t("line.errors"), values: seen.series }],
      }),
    ),
    seen.total === 0
      ? empty(t("errors.none"), t("errors.none_hint"))
      : [
          h(
            "div",
            { class: "columns", "data-key": "by" },
            section(t("errors.by_type"), byType(seen)),
            section(t("errors.by_group"), byGroup(seen)),
          ),
          section(t("errors.items"), items(seen)),
        ],
  ];
}

/// The figure of the window before; of the last 30 days nothing older is kept.
function before(span, figure, value) {
  return figure === null ? t("before.unknown") : t(`before.${span}`, { value });
}

function card(title, value, direction, before) {
  return h(
    "div",
    { class: "card", "data-key": title },
    h("h2", {}, title),
    h("p", { class: "figure" }, value, " ", direction),
    h("p", { class: "faint" }, before),
  );
}

/// More, less, or as many as in the window before; more errors are worse.
function trend(now, before) {
  if (now === null || before === null || now === undefined || before === undefined)
    return h("span", { class: "faint" }, NONE);
  if (now === before)
    return h(
      "span",
      { class: "trend faint", title: t("trend.same") },
      icon("same"),
      h("span", { class: "unseen" }, t("trend.same")),
    );
  const isMore = now > before;
  const change = before > 0 ? ` ${share(Math.abs(now - before) / before, 0)}` : "";
  const words = t(isMore ? "trend.more" : "trend.less");
  return h(
    "span",
    { class: isMore ? "trend bad" : "trend good", title: words },
    icon(isMore ? "up" : "down"),
    h("span", { class: "unseen" }, words),
    change,
  );
}

function byType(seen) {
  return table({
    caption: t("errors.by_type"),
    rows: seen.by_type,
    key: (row) => row.error_type,
    columns: [
      { label: t("letter.error_type"), is: "wide", cell: (row) => code(row.error_type, 80) },
      { label: t("errors.count"), is: "number", cell: (row) => h("b", {}, number(row.count)) },
      {
        label: t("errors.share"),
        is: "number",
        cell: (row) => [
          h("meter", { min: 0, max: 1, value: row.share ?? 0, "aria-hidden": "true" }),
          " ",
          share(row.share, 0),
        ],
      },
      { label: t("errors.change"), cell: (row) => trend(row.count, row.before) },
    ],
  });
}

function byGroup(seen) {
  return table({
    caption: t("errors.by_group"),
    rows: seen.by_group.filter((row) => row.count > 0 || row.before > 0),
    key: (row) => row.group,
    columns: [
      {
        label: t("instance.group"),
        is: "wide",
        cell: (row) =>
          h("a", { href: listOf({ consumer: row.group.replace(/^consumer\//, "") }) }, code(row.group, 80)),
      },
      { label: t("errors.count"), is: "number", cell: (row) => h("b", {}, number(row.count)) },
      { label: t("errors.rate"), is: "number", cell: (row) => share(row.rate) },
      { label: t("errors.change"), cell: (row) => trend(row.count, row.before) },
    ],
  });
}

function items(seen) {
  return table({
    caption: t("errors.items"),
    rows: seen.items,
    key: (row) => `${row.group} ${row.metric} ${row.error_type}`,
    columns: [
      { label: t("instance.group"), cell: (row) => code(row.group, 80) },
      { label: t("errors.metric"), cell: (row) => named("metric", row.metric) },
      { label: t("letter.error_type"), is: "wide", cell: (row) => code(row.error_type, 80) },
      { label: t("errors.count"), is: "number", cell: (row) => h("b", {}, number(row.count)) },
      { label: t("errors.change"), cell: (row) => trend(row.count, row.before) },
    ],
  });
}
