// Charts over time: lines that also differ by their dashes, a cursor for pointer and arrow keys, and the figures as a table.

import { h, svg } from "../dom.js";
import { tick } from "../format.js";
import { t } from "../i18n.js";
import { table } from "./table.js";

const WIDTH = 600;
const HEIGHT = 140;

// Where the cursor of each chart stands, so that new figures do not move it.
const cursors = new Map();

/// `lines` are `{name, values: [number | null]}`, `at` the beginnings of the buckets, `format` turns a value into a text.
/// `redraw` draws the page again after the cursor moved.
export function chart({ id, title, at, lines, format, redraw }) {
  const values = lines.flatMap((line) => line.values).filter((value) => value !== null && value !== undefined);
  const top = ceiling(Math.max(0, ...values));
  const isLong = at.length > 1 && new Date(at.at(-1)) - new Date(at[0]) > 2 * 86_400_000;
  const cursor = cursors.get(id);
  const index = cursor !== undefined && cursor < at.length ? cursor : null;
  const shown = index ?? lastKnown(lines, at.length);
  const x = (position) => (at.length > 1 ? (position / (at.length - 1)) * WIDTH : WIDTH / 2);
  const y = (value) => HEIGHT - (top > 0 ? value / top : 0) * HEIGHT;
  const move = (position) => {
    if (position === null) cursors.delete(id);
    else cursors.set(id, Math.max(0, Math.min(at.length - 1, position)));
    redraw();
  };

  return h(
    "figure",
    { class: "chart", "data-key": `chart-${id}` },
    h(
      "figcaption",
      {},
      h("h3", {}, title),
      h("span", { class: "at faint" }, shown === null ? "" : tick(at[shown], isLong)),
      h(
        "ul",
        { class: "legend" },
        lines.map((line, number) =>
          h(
            "li",
            { class: `line-${number}` },
            svg("svg", { viewBox: "0 0 18 6", "aria-hidden": "true" }, svg("path", { d: "M0 3h18" })),
            line.name,
            " ",
            h("b", {}, shown === null ? format(null) : format(line.values[shown] ?? null)),
          ),
        ),
      ),
    ),
    h(
      "div",
      { class: "plot" },
      h("span", { class: "top faint" }, format(top)),
      svg(
        "svg",
        {
          viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
          preserveAspectRatio: "none",
          role: "img",
          tabindex: "0",
          "aria-label": describe(title, lines, format),
          onpointermove: (event) => {
            if (at.length === 0) return;
            const box = event.currentTarget.getBoundingClientRect();
            const position = Math.round(((event.clientX - box.left) / box.width) * (at.length - 1));
            if (cursors.get(id) !== position) move(position);
          },
          onpointerleave: () => move(null),
          onblur: () => move(null),
          onkeydown: (event) => {
            const from = cursors.get(id) ?? at.length - 1;
            const step = { ArrowLeft: -1, ArrowRight: 1, Home: -at.length, End: at.length }[event.key];
            if (step === undefined || at.length === 0) return;
            event.preventDefault();
            move(from + step);
          },
        },
        [0.25, 0.5, 0.75].map((part) => svg("path", { class: "grid", d: `M0 ${HEIGHT * part}H${WIDTH}` })),
        lines.map((line, number) =>
          svg("path", { class: `area line-${number}`, d: number === 0 ? area(line.values, x, y) : "" }),
        ),
        lines.map((line, number) => svg("path", { class: `line line-${number}`, d: path(line.values, x, y) })),
        index === null ? null : svg("path", { class: "cursor", d: `M${x(index)} 0V${HEIGHT}` }),
      ),
      values.length === 0 ? h("p", { class: "none faint" }, t("chart.none")) : null,
    ),
    h(
      "div",
      { class: "ticks faint", "aria-hidden": "true" },
      at.length > 0
        ? [0, 0.5, 1].map((part) => h("span", {}, tick(at[Math.round((at.length - 1) * part)], isLong)))
        : null,
    ),
    h(
      "details",
      { "data-key": "figures" },
      h("summary", {}, t("chart.figures")),
      figures(title, at, lines, format, isLong),
    ),
  );
}

function figures(title, at, lines, format, isLong) {
  const columns = [{ label: t("chart.time"), cell: (row) => tick(at[row], isLong) }];
  for (const line of lines)
    columns.push({ label: line.name, is: "number", cell: (row) => format(line.values[row] ?? null) });
  return table({ caption: title, columns, rows: at.map((_, row) => row).reverse(), key: (row) => at[row] });
}

/// The chart in a sentence for those who do not see it.
function describe(title, lines, format) {
  const sentences = lines.map((line) => {
    const known = line.values.filter((value) => value !== null && value !== undefined);
    if (known.length === 0) return t("chart.line.none", { name: line.name });
    return t("chart.line", {
      name: line.name,
      last: format(known.at(-1)),
      least: format(Math.min(...known)),
      most: format(Math.max(...known)),
    });
  });
  return `${title}. ${sentences.join(" ")}`;
}

function lastKnown(lines, length) {
  for (let position = length - 1; position >= 0; position--) {
    if (lines.some((line) => line.values[position] !== null && line.values[position] !== undefined)) return position;
  }
  return null;
}

/// A round figure above the largest value.
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 1.5, 2, 3, 5, 7.5].find((step) => step * power >= value) ?? 10) * power;
}

/// A line that is broken where nothing is known.
function path(values, x, y) {
  let text = "";
  let isOn = false;
  values.forEach((value, position) => {
    if (value === null || value === undefined) {
      isOn = false;
      return;
    }
    const isAlone = !isOn && (values[position + 1] === null || values[position + 1] === undefined);
    text += `${isOn ? "L" : "M"}${round(x(position))} ${round(y(value))}${isAlone ? "h1.5" : ""}`;
    isOn = true;
  });
  return text;
}

function area(values, x, y) {
  if (values.length < 2) return "";
  const points = values.map((value, position) => `L${round(x(position))} ${round(y(value ?? 0))}`).join("");
  return `M0 ${HEIGHT}${points}L${WIDTH} ${HEIGHT}Z`;
}

function round(value) {
  return Math.round(value * 10) / 10;
}
