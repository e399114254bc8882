// One dead letter: why it was given up, and what was tried. Its payload only when asked for.

import { bytes, get } from "../api.js";
import { h } from "../dom.js";
import { bytes as size, number } from "../format.js";
import { t } from "../i18n.js";
import { discard, listOf, replay } from "../parts/decide.js";
import { ask } from "../parts/dialog.js";
import { replayPanel } from "../parts/replays.js";
import { table } from "../parts/table.js";
import { clip, code, empty, facts, heading, loading, named, prose, section, when } from "../parts/words.js";
import { state } from "./dead.js";

const EVERY_MS = 5_000;
// More of a payload than this is not shown; the command shows all.
const SHOWN_BYTES_MAX = 64 * 1024;

export function letter(ctx) {
  const id = Number(ctx.args[0]);
  const seen = { letter: null, payload: null, replay: null, isGone: false };
  const draw = () => ctx.show(page(ctx, id, seen, draw, load));
  const load = async () => {
    try {
      seen.letter = await get(`/dead-letters/${id}`, ctx.signal);
    } catch (problem) {
      if (problem.status !== 404) throw problem;
      seen.isGone = true;
    }
    draw();
  };
  ctx.on("replay", (replay) => {
    if (replay.id !== seen.replay?.id) return;
    seen.replay = replay;
    draw();
    ctx.attempt(load);
  });
  ctx.every(EVERY_MS, load);
  draw();
}

function page(ctx, id, seen, draw, load) {
  const back = h("a", { class: "button", href: "#/dead", "data-key": "back" }, t("letter.back"));
  const progress = seen.replay ? replayPanel([seen.replay], ctx.canAct) : null;
  if (seen.isGone) {
    const text = seen.letter ? t("letter.gone") : t("letter.none", { id: String(id) });
    return [
      heading(t("letter.title", { id: String(id) }), back),
      progress,
      empty(text, t("letter.gone_hint"), seen.letter ? "good" : "idle"),
    ];
  }
  if (!seen.letter) return [heading(t("letter.title", { id: String(id) }), back), loading()];
  const { letter } = seen;
  const began = async (replay) => {
    seen.replay = await get(`/dead-letters/replays/${encodeURIComponent(replay)}`);
    draw();
    ctx.attempt(load);
  };
  const decide = ctx.canAct && letter.state === "dead";
  return [
    heading(
      t("letter.title", { id: String(id) }),
      decide
        ? h(
            "button",
            { type: "button", class: "primary", "data-key": "replay", onclick: () => replay({ ids: [id] }, 1, began) },
            t("act.replay"),
          )
        : null,
      decide
        ? h(
            "button",
            {
              type: "button",
              class: "danger",
              "data-key": "discard",
              onclick: () => discard({ ids: [id] }, 1, () => ctx.attempt(load)),
            },
            t("act.discard"),
          )
        : null,
      back,
    ),
    progress,
    h("div", { class: "columns", "data-key": "top" }, why(letter), what(letter)),
    section(t("letter.attempts"), attempts(letter)),
    section(t("letter.payload"), payload(ctx, letter, seen, draw)),
    letter.envelope ? section(t("letter.envelope"), json(letter.envelope)) : null,
    letter.headers ? section(t("letter.headers"), json(letter.headers)) : null,
    section(t("letter.origin"), json(letter.origin)),
  ];
}

function why(letter) {
  const causes = Array.isArray(letter.causes) ? letter.causes : [];
  return section(
    t("letter.why"),
    h("p", { class: "error-type" }, h("b", {}, clip(letter.error_type, 200))),
    h("pre", { class: "text", tabindex: "0", "aria-label": t("letter.error") }, letter.error),
    causes.length > 0
      ? [
          h("h3", {}, t("letter.causes")),
          h(
            "ol",
            { class: "causes" },
            causes.map((cause) =>
              h("li", { class: "text" }, typeof cause === "string" ? cause : JSON.stringify(cause)),
            ),
          ),
        ]
      : null,
  );
}

function what(letter) {
  return section(
    t("letter.what"),
    facts([
      [t("dead.state"), state(letter)],
      [t("dead.stage"), named("stage", letter.stage)],
      [t("dead.consumer"), h("a", { href: listOf({ consumer: letter.consumer }) }, clip(letter.consumer, 100))],
      [t("dead.topic"), code(letter.topic, 200)],
      [t("dead.type"), code(letter.type, 200)],
      [
        t("dead.key"),
        letter.key
          ? h("a", { href: listOf({ consumer: letter.consumer, key: letter.key }) }, code(letter.key, 200))
          : code(null),
      ],
      [t("dead.tenant"), code(letter.tenant, 200)],
      [t("dead.message_id"), code(letter.message_id)],
      [t("dead.attempts"), number(letter.attempts)],
      [t("dead.died"), when(letter.died_at)],
    ]),
  );
}

function attempts(letter) {
  const history = Array.isArray(letter.history) ? letter.history : [];
  if (history.length === 0) return h("p", { class: "faint" }, t("letter.no_history"));
  return table({
    caption: t("letter.attempts"),
    rows: history.map((attempt, index) => ({ ...attempt, number: index + 1 })),
    key: (attempt) => attempt.number,
    columns: [
      { label: t("letter.attempt"), is: "number", cell: (attempt) => number(attempt.attempt ?? attempt.number) },
      { label: t("chart.time"), cell: (attempt) => when(attempt.at) },
      { label: t("letter.error_type"), cell: (attempt) => clip(attempt.error_type ?? attempt.type, 80) },
      {
        label: t("letter.error"),
        is: "wide whole",
        cell: (attempt) => h("span", { class: "text" }, clip(attempt.error ?? attempt.message, 500)),
      },
    ],
  });
}

function payload(ctx, letter, seen, draw) {
  if (seen.payload) {
    return [
      seen.payload.length > SHOWN_BYTES_MAX
        ? h("p", { class: "remedy" }, prose(t("payload.cut", { size: size(SHOWN_BYTES_MAX), id: String(letter.id) })))
        : null,
      h(
        "pre",
        { class: "text", tabindex: "0", "data-key": "payload", "aria-label": t("letter.payload") },
        readable(seen.payload),
      ),
    ];
  }
  const ready = t("payload.hidden", { size: size(letter.payload_bytes) });
  if (!ctx.canAct) return h("p", { class: "faint" }, ready, " ", t("payload.operators"));
  const reveal = () =>
    ask({
      title: t("payload.title"),
      label: t("payload.show"),
      body: h("p", {}, t("payload.warning")),
      act: async () => {
        seen.payload = await bytes(`/dead-letters/${letter.id}/payload`);
        draw();
      },
    });
  return h(
    "p",
    { class: "line" },
    h("span", { class: "faint" }, ready),
    h("button", { type: "button", "data-key": "reveal", onclick: reveal }, t("payload.show")),
  );
}

/// JSON with indents, else text, else numbers of bytes.
function readable(whole) {
  const shown = whole.slice(0, SHOWN_BYTES_MAX);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(shown);
  } catch {
    if (shown.length === whole.length || shown.length < 4) return hex(shown);
    // The cut may have gone through a character.
    text = new TextDecoder().decode(shown);
  }
  if (text.includes("\u0000")) return hex(shown);
  if (shown.length < whole.length) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function hex(shown) {
  const rows = [];
  for (let at = 0; at < Math.min(shown.length, 4096); at += 16) {
    const row = [...shown.slice(at, at + 16)];
    const numbers = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const letters = row.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    rows.push(`${at.toString(16).padStart(6, "0")}  ${numbers.padEnd(47)}  ${letters}`);
  }
  return rows.join("\n");
}

function json(value) {
  return h("pre", { class: "text", tabindex: "0" }, JSON.stringify(value, null, 2));
}
