// Batches of given jobs and of the lines of files: progress, the shared budget, and their jobs.

import { attempt, confirmAction } from "../access.js";
import { byId, el, fill } from "../dom.js";
import { call, read } from "../service.js";
import { STATUS, age, line, moment, money, seconds, short, whole } from "../words.js";
import { Polling, bar, hint, refusal, request, table, tile } from "./view.js";

const POLL = 2_000;
const PAGE = 50;
const MOST_ROWS = 200; // jobs of a batch that are shown at once
const ENDED = new Set(["failed", "completed", "expired", "cancelled"]);

export class Batches {
  constructor() {
    this.batches = [];
    this.hasOlder = false;
    this.polling = new Polling(() => this.#refresh(), POLL);
    byId("older-batches").addEventListener("click", () => this.#readOlder());
  }

  open(id) {
    if (id !== this.id) {
      this.rows = MOST_ROWS;
      fill(byId("batch"), hint(id ? "Reading the batch …" : ""));
    }
    this.id = id ?? null;
    return this.polling.start();
  }

  close() {
    this.polling.stop();
  }

  async #refresh() {
    const page = await request(() => call("GET", `/v1/batches?limit=${PAGE}`));
    if (page?.refused) fill(byId("batch"), refusal(page.refused));
    if (!page?.data) return;
    const fresh = new Set(page.data.data.map(({ id }) => id));
    const older = page.data.has_more ? this.batches.filter(({ id }) => !fresh.has(id)) : [];
    if (!older.length) this.hasOlder = page.data.has_more;
    this.batches = [...page.data.data, ...older];
    this.#list();
    const id = this.id ?? (matchMedia("(min-width: 900px)").matches ? this.batches[0]?.id : null);
    byId("batches").classList.toggle("one", Boolean(this.id));
    if (!id) return fill(byId("batch"), hint(this.batches.length ? "Choose a batch." : ""));
    const shown = await request(() => call("GET", `/v1/batches/${id}`));
    if (shown?.refused) fill(byId("batch"), refusal(`There is no batch ${id}: ${shown.refused}`));
    if (shown?.data) this.#draw(shown.data);
  }

  async #readOlder() {
    const page = await request(() => call("GET", `/v1/batches?limit=${PAGE}&after=${this.batches.at(-1).id}`));
    if (!page?.data) return;
    this.hasOlder = page.data.has_more;
    this.batches.push(...page.data.data);
    this.#list();
  }

  #list() {
    byId("older-batches").hidden = !this.hasOlder;
    byId("nobatches").hidden = this.batches.length > 0;
    const chosen = this.id ?? this.batches[0]?.id;
    const focused = document.activeElement?.closest("#batch-list a")?.hash;
    fill(byId("batch-list"), this.batches.map((batch) => {
      const { total, completed, failed } = batch.request_counts;
      const name = Object.values(batch.metadata)[0];
      return el(
        "li", {},
        el(
          "a", { href: `#${batch.id}`, "aria-current": String(batch.id === chosen) },
          el("span", { class: "top" }, status(batch), el("span", { class: "age" }, age(batch.created_at))),
          el("span", { class: "title" }, name ? line(String(name), 60) : batch.input_file_id ? "Lines of a file" : "Jobs"),
          el("span", { class: "bottom" }, el("span", {}, `${whole(completed + failed)} of ${whole(total)}`), el("span", { class: "spend" }, spending(batch))),
          el("span", { class: "meter", "aria-hidden": "true", "data-ended": String(ENDED.has(batch.status)) }, el("i", { style: { "--share": total ? (completed + failed) / total : 0 } })),
        ),
      );
    }));
    if (focused) byId("batch-list").querySelector(`[href="${focused}"]`)?.focus({ preventScroll: true });
  }

  #draw(batch) {
    const { request_counts: counts, usage, metadata } = batch;
    const busy = document.activeElement?.closest("#batch")?.querySelector(":focus")?.dataset.action;
    fill(
      byId("batch"),
      el(
        "header", {},
        el("a", { class: "back", href: "#batches" }, "‹ Batches"),
        el("p", { class: "line" }, status(batch), el("code", {}, batch.id), el("span", { class: "actions" }, this.#actions(batch))),
        el("p", { class: "facts" }, facts(batch)),
        Object.keys(metadata).length ? el("p", { class: "facts" }, Object.entries(metadata).map(([key, value]) => `${key}: ${line(String(value), 80)}`).join(" · ")) : null,
      ),
      batch.errors ? el("section", { class: "panel" }, el("h3", {}, "Why it failed"), batch.errors.data.map(({ message, line: at }) => refusal(at ? `Line ${at}: ${message}` : message))) : null,
      el("section", { class: "panel" }, el("h3", {}, "Progress"), progress(batch)),
      el("section", { class: "panel" }, el("h3", {}, "Budget"), budget(batch)),
      el(
        "div", { class: "tiles" },
        tile("requests", whole(counts.total), `${whole(counts.completed)} answered, ${whole(counts.failed)} without an answer`),
        tile("tokens", short(usage.output_tokens), `${short(usage.pruned)} of them pruned`),
        tile("cost", usage.cost ? money(usage.cost) : "–", usage.cost ? "" : "no prices are set"),
        tile("work", seconds(usage.seconds), "seconds of all jobs"),
      ),
      batch.jobs ? this.#jobs(batch) : null,
    );
    if (busy) byId("batch").querySelector(`[data-action="${busy}"]`)?.focus();
  }

  #actions(batch) {
    const files = { output_file_id: "Answers", error_file_id: "Errors", input_file_id: "Input" };
    const downloads = Object.entries(files).filter(([field]) => batch[field]).map(([field, name]) =>
      el("button", { type: "button", "data-action": field, click: () => download(batch[field], `${batch.id}-${name.toLowerCase()}.jsonl`) }, name),
    );
    const ended = ENDED.has(batch.status) || batch.status === "cancelling";
    return [...downloads, ended ? null : el("button", { type: "button", "data-action": "cancel", click: () => this.#cancel(batch) }, "Cancel")];
  }

  async #cancel(batch) {
    const sure = await confirmAction("Cancel this batch?", "Jobs that have ended keep their answers; the others end with what they have.", "Cancel the batch");
    if (sure && (await attempt(() => call("POST", `/v1/batches/${batch.id}/cancel`)))) this.polling.run();
  }

  #jobs({ jobs, budget: shared }) {
    const most = Math.max(1, ...jobs.map(({ tokens, granted }) => Math.max(tokens, granted)));
    const rows = jobs.slice(0, this.rows).map((job, index) => [
      [String(index + 1), "number"],
      el("a", { href: `#${job.id}` }, el("span", { class: "status", "data-status": job.status, "data-trust": job.answer === null ? "none" : "open" }, STATUS[job.status])),
      job.answer === null ? el("span", { class: "hint" }, "no answer") : el("code", {}, line(job.answer, 90)),
      [whole(job.tokens), "number"],
      shared ? [whole(job.granted), "number"] : null,
      bar([{ name: `${job.tokens} tokens`, share: job.tokens / most, kind: "spent" }, { name: "granted", share: Math.max(0, job.granted - job.tokens) / most, kind: "granted" }], `${job.tokens} tokens spent`),
    ].filter((cell) => cell !== null));
    const headings = [["#", "number"], "Status", "Answer", ["Tokens", "number"], ...(shared ? [["Granted", "number"]] : []), shared ? "Spent of what is granted" : "Spent"];
    const rest = jobs.length - rows.length;
    const more = () => {
      this.rows += MOST_ROWS;
      this.polling.run();
    };
    return el(
      "section", { class: "panel" }, el("h3", {}, jobs.length === 1 ? "One job" : `${whole(jobs.length)} jobs`), table(headings, rows, "Jobs of the batch"),
      rest > 0 ? el("button", { type: "button", class: "link", "data-action": "more", click: more }, `and ${whole(rest)} more`) : null,
    );
  }
}

function status({ status: word }) {
  const alike = { validating: "queued", finalizing: "in_progress", cancelling: "in_progress", expired: "incomplete" }[word] ?? word;
  return el("span", { class: "status", "data-status": alike, "data-trust": "open" }, word.replace("_", " ").replace("in progress", "running"));
}

function spending({ budget: shared, usage }) {
  return shared ? `${short(usage.output_tokens)} / ${short(shared.tokens)}` : `${short(usage.output_tokens)} tokens`;
}

function facts(batch) {
  const ended = batch.completed_at ?? batch.cancelled_at ?? batch.expired_at ?? batch.failed_at;
  return [
    batch.input_file_id ? `lines of ${batch.input_file_id} for ${batch.endpoint}` : "given jobs",
    batch.model,
    `submitted ${moment(batch.created_at)}`,
    ended ? `ended ${moment(ended)}` : batch.expires_at ? `expires ${moment(batch.expires_at)}` : null,
  ].filter(Boolean).join(" · ");
}

/** Returns the bar of how far the requests of a batch are, with its legend. */
function progress({ counts, request_counts: { total, failed } }) {
  const jobs = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const refused = Math.max(0, failed - (counts.failed ?? 0) - (counts.cancelled ?? 0));
  const parts = [
    ...["completed", "incomplete", "failed", "cancelled", "in_progress", "queued"].map((name) => ({ name: STATUS[name], kind: name, count: counts[name] ?? 0 })),
    { name: "not submitted", kind: "waiting", count: Math.max(0, total - jobs - refused) },
  ].filter(({ count }) => count > 0);
  const told = parts.map(({ name, count }) => `${whole(count)} ${name}`).join(", ") || "nothing yet";
  return [
    bar(parts.map(({ name, kind, count }) => ({ name: `${count} ${name}`, kind, share: count / Math.max(1, total) })), told),
    el("p", { class: "key" }, parts.map(({ name, kind, count }) => el("span", { "data-kind": kind }, `${whole(count)} ${name}`))),
  ];
}

/** Returns the bar of the shared budget: spent, granted to jobs, and left for those that need it most. */
function budget({ budget: shared, unassigned, usage }) {
  const spent = usage.output_tokens;
  if (!shared) return hint(`Each job has its own budget; together they have spent ${whole(spent)} tokens.`);
  const left = Math.max(0, unassigned ?? 0);
  const granted = Math.max(0, shared.tokens - spent - left);
  const parts = [
    { name: "spent", kind: "spent", count: spent },
    { name: "granted to jobs", kind: "granted", count: granted },
    { name: "left to grant", kind: "waiting", count: left },
  ];
  return [
    bar(parts.map(({ name, kind, count }) => ({ name: `${whole(count)} ${name}`, kind, share: count / shared.tokens })), `${whole(spent)} of ${whole(shared.tokens)} tokens spent`),
    el("p", { class: "key" }, parts.map(({ name, kind, count }) => el("span", { "data-kind": kind }, `${whole(count)} ${name}`)), el("span", { class: "total" }, `of ${whole(shared.tokens)} tokens`)),
  ];
}

async function download(fileId, name) {
  const text = await attempt(() => read(`/v1/files/${fileId}/content`));
  if (text === undefined) return;
  const url = URL.createObjectURL(new Blob([text], { type: "application/jsonl" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
