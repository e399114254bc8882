// What changes by itself: a stream of server-sent events and, while there is none, asking again and again.

import { get, Problem } from "./api.js";

const POLL_EVERY_MS = 5_000;
// After the stream was refused (too many clients), it is tried again.
const REOPEN_AFTER_MS = 15_000;
const TOPICS = ["overview", "alerts", "replay"];

const listeners = new Map();
let source = null;
let polling = null;
let reopening = null;
let state = "starting";
let overview = null;

/// Hears of "overview", "alerts", "replay", "problem" and "state"; returns how to stop hearing.
export function on(topic, call) {
  const calls = listeners.get(topic) ?? new Set();
  listeners.set(topic, calls.add(call));
  return () => calls.delete(call);
}

/// The overview that came last, if any.
export function latest() {
  return overview;
}

/// `live`, `polling`, `lost` or `starting`.
export function connection() {
  return state;
}

export function start() {
  if (source || reopening) return;
  open();
  document.addEventListener("visibilitychange", look);
}

export function stop() {
  source?.close();
  source = null;
  clearTimeout(reopening);
  reopening = null;
  endPolling();
  document.removeEventListener("visibilitychange", look);
  overview = null;
  state = "starting";
}

function open() {
  reopening = null;
  source = new EventSource("/api/v1/events/stream");
  source.onopen = () => {
    endPolling();
    become("live");
  };
  source.onerror = () => {
    beginPolling();
    // While it connects it tries by itself; once closed it was refused.
    if (source?.readyState === EventSource.CLOSED) {
      source = null;
      reopening = setTimeout(open, REOPEN_AFTER_MS);
    }
  };
  for (const topic of TOPICS) {
    source.addEventListener(topic, (event) => {
      try {
        const data = JSON.parse(event.data);
        if (topic === "overview") become("live");
        tell(topic, data);
      } catch {
        // A line that is cut off; the next one is whole.
      }
    });
  }
  source.addEventListener("problem", (event) => {
    try {
      const data = JSON.parse(event.data);
      lose(new Problem(data.status, data));
    } catch {
      become("lost");
    }
  });
}

function beginPolling() {
  if (polling) return;
  poll();
  polling = setInterval(poll, POLL_EVERY_MS);
}

function endPolling() {
  clearInterval(polling);
  polling = null;
}

async function poll() {
  if (document.hidden) return;
  try {
    const [seen, alerts, replays] = await Promise.all([
      get("/overview?window=hour"),
      get("/alerts?state=open"),
      get("/dead-letters/replays"),
    ]);
    if (!polling) return;
    become("polling");
    tell("overview", seen);
    tell("alerts", alerts);
    for (const replay of replays.items) tell("replay", replay);
  } catch (error) {
    if (polling && error instanceof Problem) lose(error);
  }
}

/// A page that nobody looks at gives its stream back: browsers have few connections for one server, servers few streams.
function look() {
  if (document.hidden) {
    source?.close();
    source = null;
    endPolling();
  } else if (!source && !reopening) {
    open();
  } else if (polling) {
    poll();
  }
}

/// What was known is not known any more.
function lose(problem) {
  overview = null;
  become("lost");
  tell("problem", problem);
}

function become(next) {
  if (state === next) return;
  state = next;
  tell("state", next);
}

function tell(topic, data) {
  if (topic === "overview") overview = data;
  for (const call of [...(listeners.get(topic) ?? [])]) call(data);
}
