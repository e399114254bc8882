// An address that names no page.

import { h } from "../dom.js";
import { t } from "../i18n.js";
import { empty, heading } from "../parts/words.js";

export function missing(ctx) {
  ctx.show(
    heading(t("missing.title")),
    empty(t("missing.text"), null, "idle"),
    h("p", {}, h("a", { class: "button", href: "#/" }, t("nav.overview"))),
  );
}
