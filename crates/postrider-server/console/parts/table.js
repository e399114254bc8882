// Tables. On a narrow screen every row becomes a card, with the column's name before each value.

import { h } from "../dom.js";

/// `columns` are `{label, cell(row), is: "number" | "wide" | "tick" | "quiet"}`; `key(row)` tells rows apart.
export function table({ caption, columns, rows, key, note }) {
  return h(
    "div",
    { class: "table" },
    h(
      "table",
      {},
      h("caption", { class: "unseen" }, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map((column) =>
            h("th", { scope: "col", class: column.is, "data-label": column.hint }, column.head ?? column.label),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            { "data-key": key ? `row-${key(row)}` : null, class: note?.(row) },
            columns.map((column) =>
              h("td", { class: column.is, "data-label": column.label }, h("div", {}, column.cell(row))),
            ),
          ),
        ),
      ),
    ),
  );
}
