// Questions before something is done. The browser keeps the focus inside, and Escape closes.

import { h, show } from "../dom.js";
import { t } from "../i18n.js";
import { trouble } from "./words.js";

/// Shows a form and, when it is sent, calls `act` with its fields. What fails is said inside, and can be tried again.
export function ask({ title, body, fields = [], label, isDanger = false, act }) {
  const opener = document.activeElement;
  const failure = h("div", { "aria-live": "assertive" });
  const confirm = h("button", { type: "submit", class: isDanger ? "danger" : "primary" }, label);
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, t("act.cancel"));
  const form = h(
    "form",
    { method: "dialog" },
    h("h2", { id: "dialog-title" }, title),
    h("div", { class: "said" }, body),
    fields,
    failure,
    h("div", { class: "buttons" }, cancel, confirm),
  );
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
  form.onsubmit = async (event) => {
    event.preventDefault();
    if (confirm.disabled) return;
    confirm.disabled = true;
    show(failure);
    try {
      await act(Object.fromEntries(new FormData(form)));
      dialog.close();
    } catch (problem) {
      show(failure, trouble(problem));
    } finally {
      confirm.disabled = false;
    }
  };
  dialog.onclose = () => {
    dialog.remove();
    if (opener?.isConnected) opener.focus();
  };
  document.body.append(dialog);
  dialog.showModal();
  (form.querySelector("input, select, textarea") ?? confirm).focus();
}

/// A labelled field of a form.
export function field(label, input, hint) {
  return h("label", { class: "field" }, h("span", {}, label), input, hint && h("small", { class: "faint" }, hint));
}
