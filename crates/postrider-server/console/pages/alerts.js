// What is wrong now and since when, what was, and what nobody wants to hear of for a while.

import { get, post, query, remove } from "../api.js";
import { h } from "../dom.js";
import { seconds } from "../format.js";
import { t } from "../i18n.js";
import { ask, field } from "../parts/dialog.js";
import { table } from "../parts/table.js";
import { toast } from "../parts/toast.js";
import { badge, clip, code, empty, heading, loading, named, pager, said, section, when } from "../parts/words.js";

const EVERY_MS = 10_000;
const LIMIT = 50;
const LENGTHS = [1800, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600];

export function alerts(ctx) {
  const before = ctx.params.get("before") ?? "";
  const seen = { open: null, all: null, silences: null };
  const draw = () => ctx.show(page(ctx, seen, before, load));
  const load = async () => {
    const [open, all, silences] = await Promise.all([
      get("/alerts?state=open", ctx.signal),
      get(`/alerts${query({ state: "all", before, limit: LIMIT })}`, ctx.signal),
      get("/silences", ctx.signal),
    ]);
    Object.assign(seen, { open: open.items, all, silences: silences.items });
    draw();
  };
  ctx.on("alerts", () => ctx.attempt(load));
  ctx.every(EVERY_MS, load);
  draw();
}

function page(ctx, seen, before, load) {
  const action = ctx.canAct
    ? h("button", { type: "button", onclick: () => silence({ rule: "", subject: "" }, ctx, load) }, t("silence.new"))
    : null;
  if (!seen.open) return [heading(t("nav.alerts"), action), loading()];
  const past = seen.all.items.filter((alert) => alert.resolved_at);
  return [
    heading(t("nav.alerts"), action),
    section(
      t("alerts.open"),
      seen.open.length > 0
        ? h(
            "ul",
            { class: "alerts" },
            seen.open.map((alert) => one(alert, ctx, load)),
          )
        : empty(t("alerts.none"), t("alerts.none_hint")),
    ),
    seen.silences.length > 0 ? section(t("silence.title"), silences(seen.silences, ctx, load)) : null,
    section(
      t("alerts.past"),
      past.length > 0 ? history(past) : h("p", { class: "faint" }, t("alerts.no_past")),
      pager(!before, "#/alerts", seen.all.next ? `#/alerts${query({ before: seen.all.next })}` : null),
    ),
  ];
}

function urgency(alert) {
  return alert.urgency === "critical" ? badge("bad", t("urgency.critical")) : badge("warn", t("urgency.warning"));
}

function one(alert, ctx, load) {
  return h(
    "li",
    { class: alert.urgency === "critical" ? "bad" : "warn", "data-key": `alert-${alert.id}` },
    h(
      "div",
      { class: "line" },
      urgency(alert),
      h("b", {}, named("rule", alert.rule)),
      code(alert.subject, 100),
      h("span", { class: "faint" }, t("alerts.since"), " ", when(alert.fired_at)),
      alert.silenced ? badge("idle", t("alerts.silenced")) : null,
      ctx.canAct && !alert.silenced
        ? h("button", { type: "button", onclick: () => silence(alert, ctx, load) }, t("silence.act"))
        : null,
    ),
    said(alert.summary, "p"),
    said(alert.remedy, "p", { class: "remedy" }),
  );
}

function silences(list, ctx, load) {
  const end = async (silence) => {
    try {
      await remove(`/silences/${silence.id}`);
      toast(t("silence.ended"));
    } catch (problem) {
      toast(problem.message, "bad");
    }
    ctx.attempt(load);
  };
  const columns = [
    { label: t("alerts.rule"), cell: (silence) => (silence.rule ? named("rule", silence.rule) : t("silence.all")) },
    {
      label: t("alerts.subject"),
      cell: (silence) => (silence.subject ? code(silence.subject, 100) : t("silence.all")),
    },
    { label: t("silence.until"), cell: (silence) => when(silence.until) },
    { label: t("silence.reason"), is: "wide", cell: (silence) => clip(silence.reason, 200) },
    { label: t("audit.actor"), cell: (silence) => clip(silence.actor, 80) },
  ];
  if (ctx.canAct)
    columns.push({
      label: t("silence.end"),
      cell: (silence) => h("button", { type: "button", onclick: () => end(silence) }, t("silence.end")),
    });
  return table({ caption: t("silence.title"), rows: list, key: (silence) => silence.id, columns });
}

/// Asks for how long and why. Empty rule and subject mean all.
function silence({ rule, subject }, ctx, load) {
  ask({
    title: t("silence.new"),
    label: t("silence.act"),
    body: h("p", {}, t("silence.explained")),
    fields: [
      field(
        t("alerts.rule"),
        h("input", { type: "text", name: "rule", value: rule, autocomplete: "off", spellcheck: "false" }),
        t("silence.all_hint"),
      ),
      field(
        t("alerts.subject"),
        h("input", { type: "text", name: "subject", value: subject, autocomplete: "off", spellcheck: "false" }),
        t("silence.all_hint"),
      ),
      field(
        t("silence.for"),
        h(
          "select",
          { name: "for_secs" },
          LENGTHS.map((length) => h("option", { value: length, selected: length === 3600 }, seconds(length))),
        ),
      ),
      field(t("silence.reason"), h("input", { type: "text", name: "reason", maxlength: 200, required: true })),
    ],
    act: async (given) => {
      await post("/silences", {
        rule: given.rule.trim(),
        subject: given.subject.trim(),
        for_secs: Number(given.for_secs),
        reason: given.reason,
      });
      toast(t("silence.begun"));
      ctx.attempt(load);
    },
  });
}

function history(list) {
  const lasted = (alert) =>
    seconds(Math.max(0, Math.round((new Date(alert.resolved_at) - new Date(alert.fired_at)) / 1000)));
  return table({
    caption: t("alerts.past"),
    rows: list,
    key: (alert) => alert.id,
    columns: [
      { label: t("alerts.urgency"), cell: urgency },
      { label: t("alerts.rule"), cell: (alert) => named("rule", alert.rule) },
      { label: t("alerts.subject"), cell: (alert) => code(alert.subject, 100) },
      { label: t("alerts.summary"), is: "wide", cell: (alert) => said(alert.summary) },
      { label: t("alerts.fired"), cell: (alert) => when(alert.fired_at) },
      { label: t("alerts.lasted"), is: "number", cell: lasted },
    ],
  });
}
