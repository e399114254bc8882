// Who did what, newest first.

import { get, query } from "../api.js";
import { t } from "../i18n.js";
import { table } from "../parts/table.js";
import { clip, empty, heading, loading, named, pager, section, when } from "../parts/words.js";

const EVERY_MS = 10_000;
const LIMIT = 100;

export function audit(ctx) {
  const before = ctx.params.get("before") ?? "";
  let list = null;
  const draw = () => ctx.show(heading(t("nav.audit")), list ? lines(list, before) : loading());
  ctx.every(EVERY_MS, async () => {
    list = await get(`/audit${query({ before, limit: LIMIT })}`, ctx.signal);
    draw();
  });
  draw();
}

function lines(list, before) {
  if (list.items.length === 0) return empty(t("audit.none"), t("audit.none_hint"), "idle");
  return section(
    t("audit.lines"),
    table({
      caption: t("audit.lines"),
      rows: list.items,
      key: (line) => line.id,
      columns: [
        { label: t("chart.time"), cell: (line) => when(line.at) },
        { label: t("audit.actor"), cell: (line) => clip(line.actor, 80) },
        { label: t("audit.action"), cell: (line) => named("action", line.action) },
        { label: t("audit.detail"), is: "wide", cell: (line) => clip(flat(line.detail), 300) },
      ],
    }),
    pager(!before, "#/audit", list.next ? `#/audit${query({ before: list.next })}` : null),
  );
}

/// `{a: 1, b: [2, 3]}` as "a 1 · b 2, 3".
function flat(detail) {
  if (detail === null || typeof detail !== "object") return detail === null ? "" : String(detail);
  return Object.entries(detail)
    .filter(([, value]) => value !== null && value !== "")
    .map(
      ([name, value]) =>
        `${name} ${Array.isArray(value) ? value.slice(0, 20).join(", ") + (value.length > 20 ? " …" : "") : typeof value === "object" ? JSON.stringify(value) : value}`,
    )
    .join(" · ");
}
