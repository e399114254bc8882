// The page for those whom the server does not know.

import { post } from "../api.js";
import { h, show } from "../dom.js";
import { t } from "../i18n.js";
import { prose, said, trouble } from "../parts/words.js";

// Each form is a new element: its handler knows its own parts alone.
let forms = 0;

/// `entered` gets the new session. `isRefused`: the token was right, and the browser has not kept the cookie.
export function login(session, entered, isRefused = false) {
  const refused = isRefused ? { message: t("login.refused"), remedy: t("login.refused.remedy") } : null;
  const failure = h("div", { "aria-live": "assertive" }, refused && trouble(refused));
  const button = h("button", { type: "submit", class: "primary" }, t("act.sign_in"));
  const input = h("input", {
    type: "password",
    name: "token",
    autocomplete: "current-password",
    required: true,
    spellcheck: "false",
    placeholder: "prt_…",
  });
  const form = h(
    "form",
    {
      class: "panel",
      onsubmit: async (event) => {
        event.preventDefault();
        button.disabled = true;
        show(failure);
        try {
          entered(await post("/session", { token: input.value.trim() }));
        } catch (problem) {
          show(failure, trouble(problem));
          input.select();
        } finally {
          button.disabled = false;
        }
      },
    },
    h("img", { src: "/console/icon.svg", alt: "", width: 40, height: 40 }),
    h("h1", {}, t("login.title")),
    session.is_locked
      ? [h("p", {}, t("login.locked")), session.remedy && said(session.remedy, "p", { class: "remedy" })]
      : [
          h("p", { class: "faint" }, prose(t("login.hint"))),
          h("label", { class: "field" }, h("span", {}, t("login.token")), input),
          failure,
          button,
        ],
  );
  return h("main", { class: "alone", "data-key": `login-${++forms}` }, form);
}
