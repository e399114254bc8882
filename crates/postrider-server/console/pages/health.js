// This instance: whether it is ready, what it works on, and what the doctor says.

import { get } from "../api.js";
import { t } from "../i18n.js";
import { badge, code, empty, facts, heading, loading, said, section, when } from "../parts/words.js";
import { h } from "../dom.js";
import { findings } from "./integrity.js";

const EVERY_MS = 10_000;

export function health(ctx) {
  let seen = null;
  const draw = () => ctx.show(heading(t("nav.health")), seen ? page(seen) : loading());
  ctx.every(EVERY_MS, async () => {
    seen = await get("/health", ctx.signal);
    draw();
  });
  draw();
}

function page(seen) {
  return [
    section(
      t("health.instance"),
      facts([
        [t("health.ready"), seen.is_ready ? badge("good", t("health.is_ready")) : badge("bad", t("health.not_ready"))],
        [t("instance.version"), seen.version],
        [t("health.store"), code(seen.store, 200)],
        [t("health.schema"), seen.schema ?? "–"],
        ...seen.brokers.map((broker) => [t("health.broker", { name: broker.destination }), code(broker.url, 200)]),
      ]),
      seen.troubles.length > 0
        ? h(
            "ul",
            { class: "alerts" },
            seen.troubles.map((trouble) =>
              h(
                "li",
                { class: "bad" },
                h("b", {}, trouble.part),
                said(trouble.detail, "p"),
                said(trouble.remedy, "p", { class: "remedy" }),
              ),
            ),
          )
        : null,
    ),
    section(
      t("health.findings"),
      seen.checked_at ? h("p", { class: "faint" }, t("health.checked"), " ", when(seen.checked_at)) : null,
      seen.checked_at
        ? findings(worstFirst(seen.findings), t("integrity.well"))
        : empty(t("health.unchecked"), null, "idle"),
    ),
  ];
}

function worstFirst(list) {
  const order = { error: 0, warning: 1, ok: 2 };
  return [...list].sort((one, other) => (order[one.severity] ?? 3) - (order[other.severity] ?? 3));
}
