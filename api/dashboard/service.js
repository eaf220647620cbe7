// The REST API: requests, the key that they carry, and the event stream of a job.

import { TERMINAL } from "./words.js";

const KEY = "reasoner.key";
const PATIENCE = 30_000;
const SILENCE = 60_000; // the service sends a comment far more often
const LONGEST_PAUSE = 8_000;

/** What the service answered instead of what was asked for: a problem document. */
export class Refusal extends Error {
  constructor(status, problem) {
    super(problem.detail ?? problem.title ?? `HTTP ${status}`);
    this.status = status;
    this.errors = problem.errors ?? [];
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** JSON of a route; nothing for an empty answer. Throws `Refusal`, and `TypeError` when nobody answers. */
export async function call(method, path, body) {
  const response = await send(method, path, { body, signal: AbortSignal.timeout(PATIENCE) });
  return response.status === 204 ? null : response.json();
}

/** Hands every event of a job behind number `after` to `take`, until it has ended, over any number of connections. */
export async function follow(jobId, after, { take, signal, onConnection }) {
  let pause = 500;
  let ended = false; // a job that failed and is tried again ends more than once: the service closes at the last end
  for (;;) {
    try {
      const path = `/v1/jobs/${jobId}/events?starting_after=${after}`;
      const response = await send("GET", path, { signal });
      onConnection(true);
      if (response.status === 204) return;
      for await (const event of messages(response, signal)) {
        after = event.seq;
        pause = 500;
        ended = TERMINAL.has(event.type.replace("job.", ""));
        take(event);
      }
      if (ended) return;
    } catch (error) {
      if (signal.aborted || (error instanceof Refusal && error.status < 500 && error.status !== 429)) throw error;
      onConnection(false);
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    if (signal.aborted) return;
    pause = Math.min(LONGEST_PAUSE, pause * 2);
  }
}

async function send(method, path, { body, signal }) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const response = await fetch(path, { method, headers, body: sent, signal, cache: "no-store" });
  if (!response.ok) throw new Refusal(response.status, await response.json().catch(() => ({})));
  return response;
}

/** Events of one connection. EventSource would do the same, but cannot send a key. */
async function* messages(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await within(reader.read(), SILENCE);
      if (done || signal.aborted) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const text of lines) if (text.startsWith("data:")) yield JSON.parse(text.slice(5));
    }
  } finally {
    reader.cancel().catch(() => {}); // it is over, whatever the connection says to that
  }
}

function within(promise, milliseconds) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new TypeError("the event stream is silent")), milliseconds);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}
