// Numbers, times and events as text.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const STATUS = {
  queued: "queued", in_progress: "running", completed: "completed",
  incomplete: "incomplete", failed: "failed", cancelled: "cancelled",
};
export const TERMINAL = new Set(["completed", "incomplete", "failed", "cancelled"]);

/** Why a branch ended. */
export const REASON = {
  step: "a step; it can be continued",
  said: "injected by the search",
  answer: "states its answer",
  stop: "the model ended it",
  length: "reached the maximum length",
  context: "the context is full",
  repetition: "repeats itself",
  tool: "a call reached a limit",
  budget: "cut by the budget",
  timeout: "cut by the time limit",
  cancelled: "cancelled while generating",
  pruned: "pruned by the search",
  refused: "refused by the model's server",
  live: "still generating",
};

export const whole = (value) => WHOLE.format(value);
export const short = (value) => (Math.abs(value) < 10_000 ? WHOLE.format(value) : SHORT.format(value));
export const score = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));

export function seconds(value) {
  if (value < 10) return `${value.toFixed(1)} s`;
  const round = Math.round(value);
  if (round < 100) return `${round} s`;
  if (round < 6000) return `${Math.floor(round / 60)} min ${round % 60} s`;
  return `${(value / 3600).toFixed(1)} h`;
}

export const flops = (value) => (value === 0 ? "0" : value.toExponential(1).replace("e+", "e"));
export const money = (value) => (value === 0 ? "0" : value < 0.01 ? value.toPrecision(2) : value.toFixed(2));

export function age(since) {
  const passed = Math.max(0, Date.now() / 1000 - since);
  if (passed < 60) return "now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min`;
  if (passed < 86_400) return `${Math.floor(passed / 3600)} h`;
  return `${Math.floor(passed / 86_400)} d`;
}

/** Returns the beginning of a text on one line. */
export function line(text, most = 120) {
  const flat = text.split(/\s+/).filter(Boolean).join(" ");
  return flat.length <= most ? flat : `${flat.slice(0, Math.max(1, most - 1))}…`;
}

export function question(spec) {
  return spec.problem ?? spec.messages.findLast((message) => message.role === "user")?.content ?? "(no question)";
}

/** Returns the name that a job gave as its model, else its models. */
export function modelOf(spec) {
  return spec.name ?? (spec.models ? spec.models.map(({ model }) => model).join(" + ") : (spec.model ?? ""));
}

/** Returns a time as the date and the minute, in the reader's zone. */
export function moment(time) {
  return time === null || time === undefined ? "–" : new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

/** Returns the parameters of a strategy: "n 16 · expansions 4 · abandon (below 0.3, every 256)". */
export function parameters(strategy) {
  const named = Object.entries(strategy).filter(([name, value]) => name !== "name" && value !== null);
  return named.map(([name, value]) => `${name.replaceAll("_", " ")} ${brief(value)}`).join(" · ");
}

function brief(value) {
  if (typeof value !== "object") return line(String(value), 24);
  const parts = Object.entries(value).filter(([, part]) => part !== null);
  return `(${parts.map(([name, part]) => `${name.replaceAll("_", " ")} ${brief(part)}`).join(", ")})`;
}

/** Describes an event, for the line beside the timeline. */
export function event({ type, data }) {
  switch (type) {
    case "node":
      return `${data.node} ${data.part ? "continues" : "arrives"}: ${whole(data.tokens)} tokens${data.final ? `, ${data.reason}` : ""}`;
    case "score":
      return `${data.node} scores ${score(data.score)}`;
    case "compare":
      return `${data.nodes[0]} against ${data.nodes[1]}: ${data.score === null ? "no verdict" : score(data.score)}`;
    case "prune":
      return data.nodes.length === 1 ? `prunes ${data.nodes[0]}` : `prunes ${data.nodes.length} branches`;
    case "select":
      return data.node === null ? "chooses no answer" : `chooses ${data.node}`;
    case "logprobs":
      return `${data.node} is read for its log-probabilities`;
    case "decision":
      return `decides: ${line(decision(data), 80)}`;
    case "job.queued":
      return data.detail ?? "waits for a worker";
    case "job.started":
      return "a worker takes the job";
    case "job.resumed":
      return `a worker continues the job (attempt ${data.attempt})`;
    case "lost":
      return `${whole(data.tokens)} tokens were lost in flight`;
    default:
      return type.startsWith("job.") ? `the job is ${STATUS[type.slice(4)] ?? type.slice(4)}` : type;
  }
}

export function decision(data) {
  const entries = Object.entries(data).filter(([name, value]) => name !== "batch" && value !== null);
  return entries.map(([name, value]) => `${name.replaceAll("_", " ")} ${plain(value)}`).join(", ");
}

function plain(value) {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : value.toPrecision(2);
  return typeof value === "string" ? value : JSON.stringify(value);
}
