// What can be done with dead letters: replay and discard, both after a question.

import { post, query } from "../api.js";
import { h } from "../dom.js";
import { upTo } from "../format.js";
import { t } from "../i18n.js";
import { ask, field } from "./dialog.js";
import { toast } from "./toast.js";

const RATE = 100;

/// The filter as it is sent; all, if there is none.
export function selection(filter) {
  const given = Object.fromEntries(
    Object.entries(filter).filter(([, value]) => value !== undefined && value !== null && value !== ""),
  );
  return Object.keys(given).length > 0 ? given : { all: true };
}

/// `which` is what is sent, `count` how many they are (null if nobody knows), `done` is called with the replay's id.
export function replay(which, count, done) {
  ask({
    title: title("replay", count),
    label: t("act.replay"),
    body: [h("p", {}, t("replay.explained")), described(which)],
    fields: [
      field(
        t("replay.rate"),
        h("input", { type: "number", name: "rate", min: 1, max: 10000, value: RATE, required: true }),
        t("replay.rate_hint"),
      ),
    ],
    act: async ({ rate }) => {
      const { id } = await post("/dead-letters/replays", { ...which, rate: Number(rate) });
      toast(t("replay.begun"));
      done(id);
    },
  });
}

export function discard(which, count, done) {
  ask({
    title: title("discard", count),
    label: t("act.discard"),
    isDanger: true,
    body: [h("p", {}, t("discard.explained")), described(which)],
    fields: [
      field(
        t("discard.reason"),
        h("input", { type: "text", name: "reason", maxlength: 200, required: true }),
        t("discard.reason_hint"),
      ),
    ],
    act: async ({ reason }) => {
      const { discarded } = await post("/dead-letters/discards", { ...which, reason });
      toast(t("discard.done", { count: discarded }));
      done();
    },
  });
}

function title(verb, count) {
  if (count === null) return t(`${verb}.title_many`);
  return count >= 10_000 ? t(`${verb}.title_upto`, { count: upTo(count) }) : t(`${verb}.title`, { count });
}

/// The filter in words, so that nobody acts on more than is meant.
function described(which) {
  if (which.ids) return null;
  if (which.all) return h("p", { class: "remedy" }, t("dead.all_meant"));
  return h(
    "ul",
    { class: "chips" },
    Object.entries(which).map(([name, value]) =>
      h("li", {}, `${t(`filter.${name}`)}: `, h("b", {}, String(value).slice(0, 100))),
    ),
  );
}

/// The address of the list with a filter.
export function listOf(filter) {
  return `#/dead${query(filter)}`;
}
