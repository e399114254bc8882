// Whether events flow, at a glance.

import { get } from "../api.js";
import { h } from "../dom.js";
import { millis, NONE, number, rate, seconds, share, upTo } from "../format.js";
import { t } from "../i18n.js";
import { latest } from "../live.js";
import { chart } from "../parts/chart.js";
import { icon } from "../parts/icon.js";
import { replayPanel } from "../parts/replays.js";
import { table } from "../parts/table.js";
import { badge, choice, code, heading, loading, named, prose, said, section, when } from "../parts/words.js";

// The stream brings everything but the charts.
const SERIES_EVERY_MS = 60_000;

export function overview(ctx) {
  const span = ctx.params.get("window") === "day" ? "day" : "hour";
  let now = span === "hour" ? latest() : null;
  let figures = null;
  const draw = () => ctx.show(now ? page(ctx, now, figures, span, draw) : [heading(t("nav.overview")), loading()]);
  ctx.on("overview", (data) => {
    // The stream's figures are those of an hour.
    now =
      span === "hour"
        ? data
        : { ...data, summary: figures?.summary ?? data.summary, targets: figures?.targets ?? data.targets };
    draw();
  });
  // Old figures would say that all is well.
  ctx.on("problem", () => {
    now = null;
    draw();
  });
  ctx.every(SERIES_EVERY_MS, async () => {
    figures = await get(`/overview?window=${span}`, ctx.signal);
    now = figures;
    draw();
  });
  draw();
}

function page(ctx, now, figures, span, redraw) {
  const option = (name) => ({
    text: t(`window.${name}`),
    href: name === "hour" ? "#/" : `#/?window=${name}`,
    isCurrent: name === span,
  });
  return [
    heading(t("nav.overview"), choice(t("window.label"), [option("hour"), option("day")])),
    state(now),
    cards(now),
    replayPanel(now.replays ?? [], ctx.canAct),
    figures ? charts(figures.series, redraw) : h("div", { class: "charts loading", "data-key": "charts" }),
    h("div", { class: "columns", "data-key": "columns" }, targets(now.targets), outboxes(now.outboxes)),
    section(t("overview.instances"), instances(now.instances)),
  ];
}

/// One line that says whether a person is needed, and the open alerts.
function state(now) {
  const troubles = now.health?.troubles ?? [];
  const open = now.alerts.filter((alert) => !alert.silenced);
  if (open.length === 0 && troubles.length === 0) {
    const silenced = now.alerts.length;
    return h(
      "div",
      { class: "verdict good", "data-key": "verdict" },
      icon("good"),
      h("p", {}, t("overview.well"), silenced > 0 ? ` ${t("overview.silenced", { count: silenced })}` : null),
    );
  }
  const isBad = troubles.length > 0 || open.some((alert) => alert.urgency === "critical");
  return h(
    "div",
    { class: `verdict ${isBad ? "bad" : "warn"}`, "data-key": "verdict" },
    icon(isBad ? "bad" : "warn"),
    h(
      "ul",
      {},
      troubles.map((trouble) =>
        h(
          "li",
          {},
          h("b", {}, trouble.part),
          " ",
          said(trouble.detail),
          ". ",
          said(trouble.remedy, "span", { class: "faint" }),
        ),
      ),
      open.slice(0, 5).map((alert) =>
        h(
          "li",
          { "data-key": `alert-${alert.id}` },
          h("a", { href: "#/alerts" }, named("rule", alert.rule)),
          " ",
          // Most summaries begin with what they are about.
          alert.summary.startsWith(alert.subject) ? null : [code(alert.subject), " "],
          said(alert.summary),
        ),
      ),
      open.length > 5
        ? h("li", {}, h("a", { href: "#/alerts" }, t("overview.more_alerts", { count: open.length - 5 })))
        : null,
    ),
  );
}

function cards(now) {
  const all = now.summary.all;
  const backlogs = now.outboxes.map((outbox) => outbox.backlog).filter(Boolean);
  const sum = (field) => backlogs.reduce((total, backlog) => total + backlog[field], 0);
  const oldest = backlogs.reduce((most, backlog) => Math.max(most, backlog.oldest_secs ?? 0), 0);
  // An adopted table keeps what failed itself; it has no dead letters.
  const failed = now.outboxes.reduce((total, outbox) => total + (outbox.table ? 0 : (outbox.backlog?.failed ?? 0)), 0);
  const dead = now.consumers.reduce((total, consumer) => total + consumer.dead, failed);
  const parked = sum("retrying") + sum("waiting") + sum("failed");
  const card = (name, value, ...more) =>
    h(
      "div",
      { class: "card", "data-key": `card-${name}` },
      h("h2", {}, t(`card.${name}`)),
      h("p", { class: "figure" }, value),
      h("p", { class: "faint" }, more),
    );
  return h(
    "div",
    { class: "cards", "data-key": "cards" },
    card("throughput", rate(all.published_per_sec), t("card.applied", { rate: rate(all.applied_per_sec) })),
    card(
      "backlog",
      upTo(sum("pending")),
      t("card.oldest", { age: oldest > 0 ? seconds(oldest) : NONE }),
      parked > 0 ? ` · ${t("card.parked", { count: parked })}` : null,
    ),
    card(
      "latency",
      millis(all.latency_p99_ms),
      t("card.latencies", { mean: millis(all.latency_mean_ms), p95: millis(all.latency_p95_ms) }),
    ),
    card("errors", share(all.error_rate), t("card.failed", { count: all.failed })),
    card(
      "dead",
      upTo(dead),
      dead > 0 ? h("a", { href: "#/dead" }, t("card.look")) : t("card.none_dead"),
      all.replay_success_share === null || all.replay_success_share === undefined
        ? null
        : ` · ${t("card.replays", { share: share(all.replay_success_share, 0) })}`,
    ),
  );
}

function charts(series, redraw) {
  const { at, all } = series;
  const width = series.step_secs ?? 60;
  // The last bucket is not full yet; its rate would look like a fall.
  const isFull = (index) => index < at.length - 1;
  const perSecond = (values) => values.map((value, index) => (isFull(index) ? value / width : null));
  const line = (name, values) => ({ name: t(`line.${name}`), values });
  return h(
    "div",
    { class: "charts", "data-key": "charts" },
    chart({
      id: "throughput",
      title: t("chart.throughput"),
      at,
      format: rate,
      redraw,
      lines: [line("published", perSecond(all.published)), line("applied", perSecond(all.applied))],
    }),
    chart({
      id: "latency",
      title: t("chart.latency"),
      at,
      format: millis,
      redraw,
      lines: [line("p99", all.p99_ms), line("p95", all.p95_ms), line("mean", all.mean_ms)],
    }),
    chart({
      id: "errors",
      title: t("chart.errors"),
      at,
      format: (value) => number(value),
      redraw,
      lines: [line("failed", all.failed), line("dead", all.dead)],
    }),
  );
}

function targets(list) {
  const value = (target, figure) => (target.unit === "share" ? share(figure) : seconds(figure));
  const verdict = (isMet) =>
    isMet === null
      ? badge("idle", t("target.unknown"))
      : isMet
        ? badge("good", t("target.met"))
        : badge("bad", t("target.missed"));
  return section(
    t("overview.targets"),
    table({
      caption: t("overview.targets"),
      key: (target) => target.name,
      rows: list,
      columns: [
        { label: t("target.name"), cell: (target) => named("target", target.name) },
        { label: t("target.value"), is: "number", cell: (target) => h("b", {}, value(target, target.value)) },
        {
          label: t("target.target"),
          is: "number",
          cell: (target) => `${target.is_upper_bound ? "<" : "≥"} ${value(target, target.target)}`,
        },
        { label: t("target.verdict"), cell: (target) => verdict(target.is_met) },
      ],
    }),
  );
}

function outboxes(list) {
  return section(
    t("overview.outboxes"),
    table({
      caption: t("overview.outboxes"),
      key: (outbox) => outbox.group,
      rows: list,
      columns: [
        {
          label: t("outbox.name"),
          cell: (outbox) =>
            h("a", { href: `#/outbox?name=${encodeURIComponent(outbox.name)}` }, outbox.table ?? outbox.name),
        },
        { label: t("outbox.pending"), is: "number", cell: (outbox) => upTo(outbox.backlog?.pending) },
        { label: t("outbox.oldest"), is: "number", cell: (outbox) => seconds(outbox.backlog?.oldest_secs) },
        { label: t("breaker.name"), is: "wide", cell: breaker },
      ],
    }),
  );
}

/// How a breaker stands: closed, or why and for how long nothing passes.
export function breaker({ breaker, breaker_secs: age }) {
  if (!breaker) return badge("good", t("breaker.closed"));
  return [badge("bad", t("breaker.open", { age: seconds(age) })), " ", said(breaker, "span", { class: "faint" })];
}

function instances(list) {
  if (list.length === 0) return h("p", { class: "faint" }, prose(t("instances.none")));
  return table({
    caption: t("overview.instances"),
    key: (instance) => `${instance.group} ${instance.owner}`,
    rows: list,
    columns: [
      { label: t("instance.group"), cell: (instance) => code(instance.group) },
      { label: t("instance.owner"), cell: (instance) => code(instance.owner) },
      {
        label: t("instance.slots"),
        cell: (instance) => (instance.slots.length > 0 ? instance.slots.join(", ") : t("instance.standby")),
      },
      { label: t("instance.state"), cell: heard },
      { label: t("breaker.name"), is: "wide", cell: breaker },
      { label: t("instance.started"), is: "quiet", cell: (instance) => when(instance.started_at) },
      { label: t("instance.version"), is: "quiet", cell: (instance) => instance.version },
    ],
  });
}

function heard(instance) {
  const age = seconds(instance.silent_secs);
  return instance.is_lost ? badge("bad", t("instance.lost", { age })) : badge("good", t("instance.alive", { age }));
}
