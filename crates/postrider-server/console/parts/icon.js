// Icons as lines in a box of 16 by 16, in the colour of the text around them.

import { svg } from "../dom.js";

const PATHS = {
  overview: ["M2 13V8M6 13V3M10 13V6M14 13v-3"],
  outbox: ["M2 9v4h12V9M8 10V2M5 5l3-3 3 3"],
  consumers: ["M2 9v4h12V9M8 2v8M5 7l3 3 3-3"],
  dead: ["M2 4h12v9H2zM2 4l6 5 6-5M6 9.5l-4 3.5M10 9.5l4 3.5"],
  errors: ["M8 2l6.5 11.5h-13zM8 6.5v3M8 11.5v.1"],
  alerts: ["M4 11V7a4 4 0 0 1 8 0v4l1.5 1.5h-11zM6.8 14.3h2.4"],
  integrity: ["M8 1.8l5.5 2v4c0 3.4-2.3 5.4-5.5 6.5-3.2-1.1-5.5-3.1-5.5-6.5v-4zM5.5 8l1.8 1.8 3.4-3.6"],
  audit: ["M3.5 2h9v12h-9zM6 5.5h4M6 8h4M6 10.5h2.5"],
  health: ["M1.5 8.5h3l1.5-4.5 3.5 8.5 1.7-4h3.3"],
  good: ["M8 1.8a6.2 6.2 0 1 1 0 12.4 6.2 6.2 0 0 1 0-12.4zM5.3 8.2l1.9 1.9 3.6-3.9"],
  warn: ["M8 1.8l6.7 12h-13.4zM8 6v3.6M8 11.6v.1"],
  bad: ["M5.3 1.8h5.4l3.5 3.5v5.4l-3.5 3.5h-5.4l-3.5-3.5v-5.4zM5.8 5.8l4.4 4.4M10.2 5.8l-4.4 4.4"],
  idle: ["M8 2.5a5.5 5.5 0 1 1 0 11 5.5 5.5 0 0 1 0-11z"],
  busy: ["M8 2.5a5.5 5.5 0 1 1-5.5 5.5"],
  menu: ["M2 4h12M2 8h12M2 12h12"],
  up: ["M8 13V3M4 7l4-4 4 4"],
  down: ["M8 3v10M4 9l4 4 4-4"],
  same: ["M3 8h10"],
};

/// An icon beside a text; it says nothing by itself.
export function icon(name) {
  return svg(
    "svg",
    { class: `icon icon-${name}`, viewBox: "0 0 16 16", "aria-hidden": "true", focusable: "false" },
    (PATHS[name] ?? []).map((d) => svg("path", { d })),
  );
}
