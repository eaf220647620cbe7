// How far the answer of an ended job can be relied on. Only what is likely right is shown in green.

import { STATUS } from "./words.js";

const LIKELY = 0.5;
const DOUBTFUL = 0.2;

/**
 * Returns the trust in a job's answer: "likely" from a confidence of one half; "open" below that, without a confidence, or if
 * the solution does not state the answer; "doubtful" for a confidence or a score near 0; "none" without an answer. Empty while it runs.
 */
export function trustIn({ status, result, spec }) {
  if (status === "queued" || status === "in_progress") return "";
  if (!result || (result.answer === null && !result.tool_calls?.length)) return "none";
  const sure = findSupport({ result, spec });
  if (sure !== null && sure < DOUBTFUL) return "doubtful";
  return status === "completed" && sure !== null && sure >= LIKELY && result.answer_level !== "flexible" ? "likely" : "open";
}

/**
 * Returns what speaks for a result, from 0 to 1: its confidence, or in a vote weighted by scores the mean score of its votes if
 * that is lower, since the best of bad answers leads its vote. Null if nothing is known.
 */
export function findSupport({ result, spec }) {
  const sure = result?.confidence ?? null;
  const vote = sure !== null && spec.strategy.name === "weighted_vote" && result.votes.find(({ answer }) => answer === result.answer);
  return vote ? Math.min(sure, vote.weight / vote.count) : sure;
}

/** Returns the status of a job in words, with a warning that its answer needs. */
export function describeStatus(job) {
  const warning = { none: ", no answer", doubtful: ", doubtful" }[trustIn(job)] ?? "";
  return STATUS[job.status] + (job.status === "completed" || job.status === "cancelled" ? warning : "");
}

/** Returns the answer of a job as text; nothing without one. */
export function readAnswer({ result }) {
  if (!result) return null;
  return result.answer ?? (result.tool_calls?.length ? result.tool_calls.map(({ name }) => `${name}(…)`).join(", ") : null);
}
