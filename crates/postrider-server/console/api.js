// Talks to /api/v1. Every failure is a `Problem` with a text that can be shown and, where there is one, what to do.

import { t } from "./i18n.js";

const BASE = "/api/v1";
// A server that does not answer in this time is not going to.
const TIMEOUT_MS = 20_000;

let csrf = null;
let onSignedOut = () => {};

/// A failed request, in the words of problem+json.
export class Problem extends Error {
  constructor(status, body) {
    super(body?.detail || body?.title || t("problem.status", { status }));
    this.status = status;
    this.title = body?.title ?? null;
    this.remedy = body?.remedy ?? null;
    this.pointer = body?.pointer ?? null;
  }
}

/// The token that every change must carry.
export function useCsrf(token) {
  csrf = token;
}

/// Called when the server no longer knows who we are.
export function whenSignedOut(call) {
  onSignedOut = call;
}

export function get(path, signal) {
  return send("GET", path, undefined, signal);
}

export function post(path, body) {
  return send("POST", path, body);
}

export function remove(path) {
  return send("DELETE", path);
}

/// `{a: "1", b: ""}` as "?a=1"; nothing for nothing.
export function query(parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given).toString();
  return text ? `?${text}` : "";
}

/// The bytes behind a path.
export async function bytes(path) {
  const response = await ask("GET", path);
  return new Uint8Array(await response.arrayBuffer());
}

async function send(method, path, body, signal) {
  const response = await ask(method, path, body, signal);
  if (response.status === 204) return null;
  try {
    return await response.json();
  } catch {
    throw new Problem(response.status, { detail: t("problem.unreadable"), remedy: t("problem.unreadable.remedy") });
  }
}

async function ask(method, path, body, signal) {
  const headers = { accept: "application/json" };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (method !== "GET" && csrf) headers["x-postrider-csrf"] = csrf;
  const timeout = AbortSignal.timeout(TIMEOUT_MS);
  let response;
  try {
    response = await fetch(BASE + path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      cache: "no-store",
      redirect: "error",
      signal: signal ? AbortSignal.any([signal, timeout]) : timeout,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem(0, { detail: t("problem.unreachable"), remedy: t("problem.unreachable.remedy") });
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const problem = new Problem(response.status, said);
  if (response.status === 401 && path !== "/session") onSignedOut(problem);
  throw problem;
}
