// Who applies events, how far each has come, and what stands between it and the end.

import { get } from "../api.js";
import { h } from "../dom.js";
import { millis, number, rate, seconds, share, upTo } from "../format.js";
import { t } from "../i18n.js";
import { latest } from "../live.js";
import { listOf } from "../parts/decide.js";
import { table } from "../parts/table.js";
import { badge, code, empty, heading, loading, section } from "../parts/words.js";
import { leases } from "./outbox.js";
import { breaker } from "./overview.js";

const EVERY_MS = 5_000;

export function consumers(ctx) {
  const seen = { consumers: latest()?.consumers ?? null, summary: latest()?.summary ?? null };
  const draw = () => ctx.show(page(seen));
  const take = (data) => {
    seen.consumers = data.consumers;
    seen.summary = data.summary;
    draw();
  };
  ctx.on("overview", take);
  ctx.every(EVERY_MS, async () => {
    seen.consumers = (await get("/consumers", ctx.signal)).items;
    if (!seen.summary) seen.summary = (await get("/overview?window=hour", ctx.signal)).summary;
    draw();
  });
  draw();
}

function page({ consumers, summary }) {
  if (!consumers) return [heading(t("nav.consumers")), loading()];
  if (consumers.length === 0)
    return [heading(t("nav.consumers")), empty(t("consumers.none"), t("consumers.none_hint"), "idle")];
  const figures = new Map((summary?.groups ?? []).map((group) => [group.group, group]));
  return [
    heading(t("nav.consumers")),
    h("p", { class: "faint", "data-key": "explained" }, t("consumers.explained")),
    section(t("consumers.progress"), progress(consumers, figures)),
    section(t("consumers.inbox"), inbox(consumers, figures)),
    consumers
      .filter((consumer) => consumer.slots.length > 0)
      .map((consumer) =>
        section(
          t("consumers.slots", { name: consumer.name }),
          leases(t("consumers.slots", { name: consumer.name }), consumer.slots),
        ),
      ),
  ];
}

const name = { label: () => t("dead.consumer"), cell: (consumer) => h("b", {}, code(consumer.name, 100)) };

function progress(consumers, figures) {
  const of = (consumer) => figures.get(consumer.group) ?? {};
  return table({
    caption: t("consumers.progress"),
    rows: consumers,
    key: (consumer) => consumer.name,
    columns: [
      { label: name.label(), cell: name.cell },
      {
        label: t("instance.state"),
        cell: (consumer) =>
          consumer.instances > 0
            ? badge("good", t("consumers.alive", { count: consumer.instances }))
            : badge("warn", t("consumers.nobody")),
      },
      { label: t("consumers.rate"), is: "number", cell: (consumer) => rate(of(consumer).applied_per_sec) },
      { label: t("line.p95"), is: "number", cell: (consumer) => millis(of(consumer).latency_p95_ms) },
      { label: t("line.p99"), is: "number", cell: (consumer) => millis(of(consumer).latency_p99_ms) },
      { label: t("consumers.error_rate"), is: "number", cell: (consumer) => share(of(consumer).error_rate) },
      { label: t("consumers.behind"), is: "number", cell: (consumer) => number(consumer.behind) },
      { label: t("breaker.name"), is: "wide", cell: breaker },
    ],
  });
}

function inbox(consumers, figures) {
  const of = (consumer) => figures.get(consumer.group) ?? {};
  return table({
    caption: t("consumers.inbox"),
    rows: consumers,
    key: (consumer) => consumer.name,
    columns: [
      { label: name.label(), cell: name.cell },
      { label: t("consumers.applied"), is: "number", cell: (consumer) => number(of(consumer).applied) },
      { label: t("consumers.duplicates"), is: "number", cell: (consumer) => number(of(consumer).duplicates) },
      { label: t("consumers.retrying"), is: "number", cell: (consumer) => upTo(consumer.retrying) },
      { label: t("consumers.waiting"), is: "number", cell: (consumer) => upTo(consumer.waiting) },
      { label: t("outbox.oldest"), is: "number", cell: (consumer) => seconds(consumer.oldest_secs) },
      {
        label: t("nav.dead"),
        is: "number",
        cell: (consumer) =>
          consumer.dead > 0
            ? h("a", { class: "bad", href: listOf({ consumer: consumer.name }) }, upTo(consumer.dead))
            : number(0),
      },
      { label: t("consumers.oldest_dead"), is: "number", cell: (consumer) => seconds(consumer.oldest_dead_secs) },
    ],
  });
}
