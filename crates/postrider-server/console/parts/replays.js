// Replays with their progress. One is known to the instance that runs it, and for an hour after its end.

import { remove } from "../api.js";
import { h } from "../dom.js";
import { t } from "../i18n.js";
import { toast } from "./toast.js";
import { badge, said, when } from "./words.js";

/// Nothing for none.
export function replayPanel(replays, canAct, dismiss) {
  if (replays.length === 0) return null;
  return h(
    "section",
    { class: "panel replays", "data-key": "replays" },
    h("h2", {}, t("replays.title")),
    replays.map((replay) => one(replay, canAct, dismiss)),
  );
}

function one(replay, canAct, dismiss) {
  const decided = replay.applied + replay.failed + replay.recalled;
  const isRunning = replay.state === "running";
  // How many will follow is counted at the start, up to a limit; those that meanwhile came or went change it.
  const whole = isRunning ? Math.max(replay.expected ?? 0, replay.total, decided) : Math.max(decided, 1);
  const isCounted = replay.expected !== null && replay.expected !== undefined;
  const label = t(isCounted || !isRunning ? "replays.progress" : "replays.progress_open", {
    done: decided,
    total: whole,
  });
  return h(
    "div",
    { class: "replay", "data-key": `replay-${replay.id}`, "data-state": replay.state },
    h(
      "div",
      { class: "line" },
      // Read out when it ends; the figures below change four times a second.
      h("span", { role: "status" }, state(replay)),
      h("span", { class: "faint" }, replay.actor, " · ", when(replay.began_at)),
      isRunning && canAct
        ? h("button", { type: "button", class: "danger", onclick: () => cancel(replay) }, t("replays.cancel"))
        : null,
      !isRunning && dismiss
        ? h("button", { type: "button", class: "quiet", onclick: () => dismiss(replay) }, t("act.hide"))
        : null,
    ),
    h("progress", {
      max: whole,
      value: isRunning && !isCounted && decided === 0 ? null : isRunning ? decided : whole,
      "aria-label": label,
    }),
    h(
      "p",
      { class: "line" },
      h("span", {}, label),
      h("span", { class: "good" }, t("replays.applied", { count: replay.applied })),
      replay.failed > 0 ? h("span", { class: "bad" }, t("replays.failed", { count: replay.failed })) : null,
      replay.recalled > 0 ? h("span", {}, t("replays.recalled", { count: replay.recalled })) : null,
      replay.open > 0 ? h("span", { class: "faint" }, t("replays.open", { count: replay.open })) : null,
    ),
    replay.error ? said(replay.error, "p", { class: "bad" }) : null,
    replay.stopped === "half_failed" ? h("p", { class: "remedy" }, t("replays.half_failed")) : null,
  );
}

function state(replay) {
  if (replay.state === "running") return badge("busy", t("replays.running"));
  if (replay.state === "failed") return badge("bad", t("replays.broken"));
  if (replay.stopped === "cancelled") return badge("warn", t("replays.cancelled"));
  if (replay.stopped) return badge("bad", t("replays.stopped"));
  return replay.failed > 0 ? badge("warn", t("replays.done")) : badge("good", t("replays.done"));
}

async function cancel(replay) {
  try {
    await remove(`/dead-letters/replays/${encodeURIComponent(replay.id)}`);
    toast(t("replays.cancelling"), "warn");
  } catch (problem) {
    toast(problem.message, "bad");
  }
}
