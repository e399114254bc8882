// What waits to be published, for each outbox, and the events that hold their keys back.

import { get, query } from "../api.js";
import { h } from "../dom.js";
import { number, seconds, upTo } from "../format.js";
import { t } from "../i18n.js";
import { latest } from "../live.js";
import { listOf } from "../parts/decide.js";
import { table } from "../parts/table.js";
import { badge, choice, clip, code, empty, facts, heading, loading, pager, section, when } from "../parts/words.js";
import { breaker } from "./overview.js";

const EVERY_MS = 5_000;
const LIMIT = 50;

export function outbox(ctx) {
  const after = ctx.params.get("after") ?? "";
  const seen = { outboxes: latest()?.outboxes ?? null, parked: null };
  const current = () => seen.outboxes?.find((outbox) => outbox.name === ctx.params.get("name")) ?? seen.outboxes?.[0];
  const draw = () => ctx.show(page(seen, current(), after));
  const load = async () => {
    seen.outboxes = (await get("/outbox", ctx.signal)).items;
    const name = current()?.name;
    seen.parked =
      name === undefined
        ? null
        : await get(`/outbox/${encodeURIComponent(name)}/parked${query({ after, limit: LIMIT })}`, ctx.signal);
    draw();
  };
  ctx.on("overview", (data) => {
    seen.outboxes = data.outboxes;
    draw();
  });
  ctx.every(EVERY_MS, load);
  draw();
}

function page(seen, outbox, after) {
  if (!seen.outboxes) return [heading(t("nav.outbox")), loading()];
  if (!outbox) return [heading(t("nav.outbox")), empty(t("outbox.none"), null, "idle")];
  const address = (more) => `#/outbox${query({ name: outbox.name, ...more })}`;
  const others = seen.outboxes.map((each) => ({
    text: each.table ?? each.name,
    href: `#/outbox${query({ name: each.name })}`,
    isCurrent: each.name === outbox.name,
  }));
  return [
    heading(t("nav.outbox"), others.length > 1 ? choice(t("outbox.which"), others) : null),
    h("div", { class: "columns", "data-key": "top" }, status(outbox), lanes(outbox)),
    section(t("parked.title"), seen.parked ? parked(seen.parked, outbox, after, address) : loading()),
  ];
}

function status(outbox) {
  const { backlog } = outbox;
  return section(
    outbox.table ?? outbox.name,
    backlog
      ? h(
          "div",
          { class: "tiles" },
          ["pending", "retrying", "waiting", "failed"].map((name) =>
            h(
              "div",
              { class: backlog[name] > 0 && name === "failed" ? "bad" : null },
              h("b", {}, upTo(backlog[name])),
              h("span", {}, t(`outbox.${name}`)),
            ),
          ),
        )
      : loading(),
    facts([
      [t("outbox.oldest"), seconds(backlog?.oldest_secs)],
      [t("breaker.name"), breaker(outbox)],
      [t("outbox.destination"), code(outbox.destination)],
      [t("outbox.broker"), code(outbox.broker, 200)],
      outbox.table ? [t("outbox.table"), code(outbox.table)] : null,
      outbox.read_at ? [t("outbox.read"), when(outbox.read_at)] : null,
    ]),
  );
}

function lanes(outbox) {
  if (outbox.lanes.length === 0) return section(t("lanes.title"), empty(t("lanes.none"), t("lanes.none_hint"), "idle"));
  return section(t("lanes.title"), leases(t("lanes.title"), outbox.lanes));
}

/// Who holds which slot.
export function leases(caption, slots) {
  return table({
    caption,
    rows: slots,
    key: (slot) => slot.slot,
    columns: [
      { label: t("lane.slot"), is: "number", cell: (slot) => number(slot.slot) },
      {
        label: t("lane.owner"),
        is: "wide",
        cell: (slot) => (slot.owner ? code(slot.owner) : badge("warn", t("lane.nobody"))),
      },
      { label: t("lane.epoch"), is: "number", cell: (slot) => number(slot.epoch) },
      {
        label: t("lane.remaining"),
        is: "number",
        cell: (slot) => (slot.remaining_ms === null ? "–" : seconds(Math.max(1, Math.round(slot.remaining_ms / 1000)))),
      },
    ],
  });
}

function parked(list, outbox, after, address) {
  if (list.items.length === 0)
    return outbox.table
      ? empty(t("parked.adopted"), t("parked.adopted_hint"), "idle")
      : empty(t("parked.none"), t("parked.none_hint"));
  return [
    table({
      caption: t("parked.title"),
      rows: list.items,
      key: (event) => event.id,
      columns: [
        { label: t("dead.key"), cell: (event) => code(event.key, 60) },
        { label: t("dead.state"), cell: parkedState },
        { label: t("parked.waiting"), is: "number", cell: (event) => h("b", {}, upTo(event.waiting, 1000)) },
        {
          label: t("dead.error"),
          is: "wide",
          cell: (event) => [
            h("b", {}, clip(event.error_type, 60)),
            h("span", { class: "text" }, clip(event.error, 200)),
          ],
        },
        { label: t("dead.type"), cell: (event) => code(event.type, 60) },
        { label: t("dead.attempts"), is: "number", cell: (event) => number(event.attempts) },
        { label: t("parked.next"), cell: (event) => (event.next_at ? when(event.next_at) : t("parked.by_hand")) },
        { label: t("parked.created"), is: "quiet", cell: (event) => when(event.created_at) },
        {
          label: t("parked.letter"),
          cell: (event) =>
            event.state === "failed"
              ? h("a", { href: listOf({ consumer: `relay/${event.destination}`, key: event.key }) }, t("parked.look"))
              : "–",
        },
      ],
    }),
    pager(!after, address({}), list.next ? address({ after: list.next }) : null),
  ];
}

function parkedState(event) {
  return event.state === "failed" ? badge("bad", t("state.failed")) : badge("busy", t("state.retrying"));
}
