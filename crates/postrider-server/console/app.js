// The console: who is there, the frame around the pages, and which page is shown.

import { get, useCsrf, whenSignedOut } from "./api.js";
import { h, show } from "./dom.js";
import { begin as beginLanguage, choose, t } from "./i18n.js";
import * as live from "./live.js";
import { frame } from "./parts/frame.js";
import { toasts } from "./parts/toast.js";
import { loading, trouble } from "./parts/words.js";
import { alerts } from "./pages/alerts.js";
import { audit } from "./pages/audit.js";
import { consumers } from "./pages/consumers.js";
import { dead } from "./pages/dead.js";
import { errors } from "./pages/errors.js";
import { health } from "./pages/health.js";
import { integrity, report } from "./pages/integrity.js";
import { letter } from "./pages/letter.js";
import { login } from "./pages/login.js";
import { missing } from "./pages/missing.js";
import { outbox } from "./pages/outbox.js";
import { overview } from "./pages/overview.js";

/// The pages by their paths; `nav` says what is marked in the menu.
const PAGES = [
  { path: /^\/$/, nav: "overview", page: overview },
  { path: /^\/outbox$/, nav: "outbox", page: outbox },
  { path: /^\/consumers$/, nav: "consumers", page: consumers },
  { path: /^\/dead$/, nav: "dead", page: dead },
  { path: /^\/dead\/(\d+)$/, nav: "dead", page: letter },
  { path: /^\/errors$/, nav: "errors", page: errors },
  { path: /^\/alerts$/, nav: "alerts", page: alerts },
  { path: /^\/integrity$/, nav: "integrity", page: integrity },
  { path: /^\/integrity\/(\d+)$/, nav: "integrity", page: report },
  { path: /^\/audit$/, nav: "audit", page: audit },
  { path: /^\/health$/, nav: "health", page: health },
];

const root = h("div", { id: "root" });
const head = h("div", { class: "head" });
const main = h("main", { id: "main", tabindex: "-1" });
// Made once: an element that is moved loses the focus.
const shell = h("div", { class: "frame" }, head, main);
let session = null;
let leave = new AbortController();
let isFirst = true;
// Somebody has just logged in.
let hasEntered = false;

beginLanguage();
document.body.append(root, toasts());
addEventListener("hashchange", route);
for (const topic of ["state", "alerts", "overview"]) live.on(topic, drawFrame);
whenSignedOut(() => {
  if (session && !session.needs_login) enter();
});
enter();

/// Learns who is there, then shows the page or asks for a token.
async function enter() {
  live.stop();
  try {
    session = await get("/session");
  } catch (problem) {
    show(root, h("main", { class: "alone" }, trouble(problem, enter)));
    return;
  }
  useCsrf(session.csrf);
  const isRefused = hasEntered && session.needs_login;
  hasEntered = false;
  if (session.needs_login || session.is_locked) {
    leave.abort();
    document.title = `${t("login.title")} · Postrider`;
    show(root, login(session, entered, isRefused));
    root.querySelector("input")?.focus();
    return;
  }
  live.start();
  route();
}

function entered(next) {
  session = next;
  hasEntered = true;
  enter();
}

/// The path and the parameters behind the hash.
function place() {
  const [path, query] = (location.hash.slice(1) || "/").split("?", 2);
  return { path, params: new URLSearchParams(query ?? "") };
}

function route() {
  if (!session || session.needs_login || session.is_locked) return;
  const { path, params } = place();
  const found = PAGES.find((page) => page.path.test(path));
  leave.abort();
  leave = new AbortController();
  show(main, loading());
  drawFrame();
  const title = found ? t(`nav.${found.nav}`) : t("missing.title");
  document.title = `${title} · Postrider`;
  scrollTo(0, 0);
  (found?.page ?? missing)(context(found?.path.exec(path)?.slice(1) ?? [], params, leave.signal));
  if (!isFirst) main.focus({ preventScroll: true });
  isFirst = false;
}

/// What a page gets: where it is, how to show something, and how to hear of changes until it is left.
function context(args, params, signal) {
  let problem = null;
  let failed = null;
  // What the stream says of the store; the next overview ends it.
  let lost = null;
  let nodes = [];
  const redraw = () => {
    if (signal.aborted) return;
    // What failed is not awaited any more.
    const isShown = (node) => !node.classList.contains("loading");
    const said = problem ?? lost;
    show(main, said ? [trouble(said), ...nodes.filter(isShown)] : nodes);
  };
  const become = (next) => {
    if (lost === next) return;
    lost = next;
    redraw();
  };
  signal.addEventListener("abort", live.on("problem", become));
  signal.addEventListener(
    "abort",
    live.on("overview", () => become(null)),
  );
  const context = {
    args,
    params,
    signal,
    canAct: session.role === "operator",
    show: (...shown) => {
      nodes = shown.flat(Infinity).filter(Boolean);
      redraw();
    },
    on: (topic, call) => signal.addEventListener("abort", live.on(topic, call)),
    /// Runs `call` now and then every so often while somebody looks. What fails is shown above what was there before.
    every: (ms, call) => {
      const guarded = async () => {
        if (document.hidden || signal.aborted) return;
        await context.attempt(call);
      };
      const timer = setInterval(guarded, ms);
      signal.addEventListener("abort", () => clearInterval(timer));
      return context.attempt(call);
    },
    attempt: async (call) => {
      try {
        await call();
        // What another call has failed with is not over.
        if (problem && failed === call) {
          problem = null;
          redraw();
        }
      } catch (error) {
        if (signal.aborted) return;
        failed = call;
        problem = error;
        redraw();
      }
    },
  };
  return context;
}

function drawFrame() {
  if (!session || session.needs_login || session.is_locked) return;
  const found = PAGES.find((page) => page.path.test(place().path));
  show(root, shell);
  show(
    head,
    frame({
      session,
      current: found?.nav,
      overview: live.latest(),
      connection: live.connection(),
      choose: (language) => {
        choose(language);
        route();
      },
      redraw: drawFrame,
      leave: enter,
    }),
  );
}
