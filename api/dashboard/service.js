// Client of the REST API: requests with a key, and the event stream of a job.

import { TERMINAL } from "./words.js";

const KEY = "reasoner.key";
export const ROOT = new URL("../", import.meta.url); // the service, which may be below a path of its host
const PATIENCE = 30_000;
const MAX_SILENCE = 60_000; // milliseconds; the service sends a comment far more often
const LONGEST_PAUSE = 8_000;

/** An error response of the service: a problem document, or an error in OpenAI's format. */
export class Refusal extends Error {
  constructor(status, problem) {
    super(problem.detail ?? problem.error?.message ?? problem.title ?? `HTTP ${status}`); // OpenAI's routes have 'error'
    this.status = status;
    this.errors = problem.errors ?? [];
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Returns the JSON of a route, or nothing for an empty response. Throws `Refusal`, or `TypeError` without a response. */
export async function call(method, path, body) {
  const response = await send(method, path, { body, signal: AbortSignal.timeout(PATIENCE) });
  return response.status === 204 ? null : response.json();
}

/** Returns the body of a route as text. Throws as `call` does. */
export async function read(path) {
  return (await send("GET", path, { signal: AbortSignal.timeout(PATIENCE) })).text();
}

/** Passes every event of a job after number `after` to `take` until the job has ended, over any number of connections. */
export async function follow(jobId, after, { take, signal, onConnection }) {
  let pause = 500;
  let ended = false; // a retried job ends more than once; the service closes the stream at the last end
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
  const response = await fetch(new URL(`.${path}`, ROOT), { method, headers, body: sent, signal, cache: "no-store" });
  if (!response.ok) throw new Refusal(response.status, await response.json().catch(() => ({})));
  return response;
}

/** Yields the events of one connection. EventSource would do the same, but cannot send a key. */
async function* messages(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await within(reader.read(), MAX_SILENCE);
      if (done || signal.aborted) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const text of lines) if (text.startsWith("data:")) yield JSON.parse(text.slice(5));
    }
  } finally {
    reader.cancel().catch(() => {}); // errors do not matter, the stream is over
  }
}

function within(promise, milliseconds) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new TypeError("the event stream is silent")), milliseconds);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}
