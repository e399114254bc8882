// Reports of the integrity check, and running one now.

import { get, post, query } from "../api.js";
import { h } from "../dom.js";
import { number, seconds } from "../format.js";
import { t } from "../i18n.js";
import { table } from "../parts/table.js";
import { toast } from "../parts/toast.js";
import { badge, clip, code, empty, facts, heading, loading, pager, said, section, when } from "../parts/words.js";

const EVERY_MS = 10_000;
const RUNNING_EVERY_MS = 2_000;
const LIMIT = 50;
// A report without an end that is older than this belongs to an instance that died.
const RUNS_AT_MOST_MS = 60 * 60_000;

export function integrity(ctx) {
  const before = ctx.params.get("before") ?? "";
  let list = null;
  let isAsked = false;
  const run = async () => {
    isAsked = true;
    draw();
    try {
      const { id } = await post("/integrity", {});
      location.hash = `/integrity/${id}`;
    } catch (problem) {
      toast(problem.message, problem.status === 409 ? "warn" : "bad");
    }
    isAsked = false;
    draw();
  };
  const action = () =>
    ctx.canAct
      ? h(
          "button",
          { type: "button", class: "primary", disabled: isAsked, "data-key": "run", onclick: run },
          t("integrity.run"),
        )
      : null;
  const draw = () =>
    ctx.show(
      heading(t("nav.integrity"), action()),
      h("p", { class: "faint", "data-key": "explained" }, t("integrity.explained")),
      list ? reports(list, before) : loading(),
    );
  ctx.every(EVERY_MS, async () => {
    list = await get(`/integrity${query({ before, limit: LIMIT })}`, ctx.signal);
    draw();
  });
  draw();
}

function reports(list, before) {
  if (list.items.length === 0) return empty(t("integrity.none"), t("integrity.none_hint"), "idle");
  return section(
    t("integrity.reports"),
    table({
      caption: t("integrity.reports"),
      rows: list.items,
      key: (report) => report.id,
      columns: [
        {
          label: t("integrity.report"),
          is: "number",
          cell: (report) => h("a", { href: `#/integrity/${report.id}` }, `#${report.id}`),
        },
        { label: t("integrity.began"), cell: (report) => when(report.began_at) },
        { label: t("integrity.took"), is: "number", cell: took },
        {
          label: t("integrity.asked"),
          cell: (report) => (report.actor === "schedule" ? t("integrity.schedule") : clip(report.actor, 80)),
        },
        {
          label: t("integrity.checks"),
          is: "number",
          cell: (report) => (report.ended_at ? number(report.checks) : "–"),
        },
        { label: t("integrity.result"), cell: result },
      ],
    }),
    pager(!before, "#/integrity", list.next ? `#/integrity${query({ before: list.next })}` : null),
  );
}

function took(report) {
  return report.ended_at ? seconds((new Date(report.ended_at) - new Date(report.began_at)) / 1000) : "–";
}

function isRunning(report) {
  return !report.ended_at && Date.now() - new Date(report.began_at) < RUNS_AT_MOST_MS;
}

function result(report) {
  if (isRunning(report)) return badge("busy", t("integrity.running"));
  if (!report.ended_at) return badge("warn", t("integrity.broken"));
  if (report.errors > 0) return badge("bad", t("integrity.errors", { count: report.errors }));
  if (report.warnings > 0) return badge("warn", t("integrity.warnings", { count: report.warnings }));
  return badge("good", t("integrity.clean"));
}

/// One report with its findings.
export function report(ctx) {
  const id = ctx.args[0];
  let seen = null;
  const back = () => h("a", { class: "button", href: "#/integrity" }, t("integrity.back"));
  const draw = () => ctx.show(heading(t("integrity.title", { id }), back()), seen ? detail(seen) : loading());
  ctx.every(RUNNING_EVERY_MS, async () => {
    if (seen && !isRunning(seen)) return;
    seen = await get(`/integrity/${id}`, ctx.signal);
    draw();
  });
  draw();
}

function detail(seen) {
  return [
    section(
      t("integrity.result"),
      facts([
        [t("integrity.result"), result(seen)],
        [t("integrity.began"), when(seen.began_at)],
        [t("integrity.took"), took(seen)],
        [t("integrity.asked"), seen.actor === "schedule" ? t("integrity.schedule") : clip(seen.actor, 80)],
        [t("integrity.checks"), seen.ended_at ? number(seen.checks) : "–"],
      ]),
    ),
    section(t("integrity.findings"), seen.ended_at ? findings(seen.findings, t("integrity.well")) : loading()),
  ];
}

/// What was found, with what to do.
export function findings(list, well) {
  if (list.length === 0) return empty(well);
  const kind = { ok: "good", warning: "warn", error: "bad" };
  return table({
    caption: t("integrity.findings"),
    rows: list.map((finding, index) => ({ ...finding, index })),
    key: (finding) => finding.index,
    columns: [
      {
        label: t("finding.severity"),
        cell: (finding) => badge(kind[finding.severity] ?? "idle", t(`severity.${finding.severity}`)),
      },
      { label: t("finding.check"), cell: (finding) => code(finding.check) },
      {
        label: t("finding.message"),
        is: "wide whole",
        cell: (finding) => said(finding.message, "span", { class: "text" }),
      },
      {
        label: t("finding.remedy"),
        is: "wide whole",
        cell: (finding) => said(finding.remedy, "span", { class: "text" }),
      },
    ],
  });
}
