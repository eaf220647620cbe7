// The jobs that the list shows: the newest that the filters let through, and older pages on request.

import { attemptOrRefuse } from "./access.js";
import { byId, write } from "./dom.js";
import { Filters } from "./filters.js";
import { JobList } from "./jobs.js";
import { Refusal, call } from "./service.js";

const PAGE = 50;

export class History {
  /** `onOpen(id)` for a click on a job, `onUpdate(job)` for each job that was read again. */
  constructor({ onOpen, onUpdate }) {
    this.jobs = [];
    this.opened = null;
    this.hasOlder = false;
    this.refused = null; // the filters that the service has refused
    this.refreshing = false;
    this.list = new JobList(byId("list"), onOpen);
    this.filters = new Filters(() => this.#restart());
    this.onUpdate = onUpdate;
    byId("older").addEventListener("click", () => this.readOlder());
  }

  find(id) {
    return this.jobs.find((job) => job.id === id);
  }

  add(job) {
    this.#show([job, ...this.jobs.filter(({ id }) => id !== job.id)]);
  }

  drop(id) {
    this.#show(this.jobs.filter((job) => job.id !== id));
  }

  /** Marks the open job in the list. */
  mark(id) {
    this.opened = id;
    this.#show(this.jobs);
    byId("list").querySelector("[aria-current=true]")?.scrollIntoView({ block: "nearest" });
  }

  /** Returns the id of the job `by` places below the open one. */
  neighbour(by) {
    const index = this.jobs.findIndex(({ id }) => id === this.opened);
    return this.jobs[index < 0 ? 0 : Math.min(this.jobs.length - 1, Math.max(0, index + by))]?.id ?? null;
  }

  async refresh() {
    const query = this.filters.read();
    if (document.hidden || this.refreshing || this.refused === query.toString()) return;
    this.refreshing = true;
    const page = await this.#read(query);
    this.refreshing = false;
    if (query.toString() !== this.filters.read().toString()) return this.refresh();
    byId("list").setAttribute("aria-busy", "false");
    if (page) this.#merge(page);
  }

  async readOlder() {
    const query = this.filters.read();
    query.set("after", this.jobs.at(-1).id);
    const page = await this.#read(query);
    if (!page) return;
    this.hasOlder = page.has_more;
    this.#show([...this.jobs, ...page.data.filter(({ id }) => !this.find(id))]);
  }

  /** Returns a page; nothing if it could not be read. A refusal is shown with the filters. */
  async #read(query) {
    const filters = query.toString();
    const page = await attemptOrRefuse(() => call("GET", `/v1/jobs?limit=${PAGE}${filters && `&${filters}`}`));
    if (!(page instanceof Refusal)) {
      this.filters.refuse("");
      return page;
    }
    this.refused = filters;
    this.filters.refuse(page.message, page.errors);
    this.#show([]);
    return undefined;
  }

  #restart() {
    this.jobs = [];
    this.refused = null;
    byId("list").setAttribute("aria-busy", "true");
    this.refresh();
  }

  /** Joins the newest page with the older jobs that were read before. */
  #merge(page) {
    const last = page.data.at(-1)?.created_at ?? Infinity;
    const fresh = new Set(page.data.map(({ id }) => id));
    const older = page.has_more ? this.jobs.filter((job) => job.created_at <= last && !fresh.has(job.id)) : [];
    if (!older.length) this.hasOlder = page.has_more;
    this.#show([...page.data, ...older]);
    for (const job of page.data) this.onUpdate(job);
  }

  #show(jobs) {
    this.jobs = jobs;
    this.list.draw(jobs, this.opened);
    const filtered = this.filters.read().size > 0;
    byId("older").hidden = !this.hasOlder || !jobs.length;
    byId("nojobs").hidden = jobs.length > 0 || filtered;
    const refused = this.refused !== null && this.refused === this.filters.read().toString();
    byId("nomatch").hidden = jobs.length > 0 || !filtered || refused || byId("list").ariaBusy === "true";
    write(byId("listed"), filtered && jobs.length ? `${jobs.length}${this.hasOlder ? " or more" : ""} found` : "");
  }
}

/** Returns a job that is not in the list; nothing if there is none. */
export async function readJob(id) {
  const job = await attemptOrRefuse(() => call("GET", `/v1/jobs/${id}`));
  return job instanceof Refusal ? null : job;
}

