// The list of jobs, newest first.

import { el, put, write } from "./dom.js";
import { STATUS, TERMINAL, age, line, parameters, question, short } from "./words.js";

export class JobList {
  constructor(list, onOpen) {
    this.list = list;
    this.rows = new Map();
    this.onOpen = onOpen;
  }

  draw(jobs, opened) {
    const wanted = new Set(jobs.map((job) => job.id));
    for (const [id, row] of this.rows) {
      if (!wanted.has(id)) {
        row.item.remove();
        this.rows.delete(id);
      }
    }
    jobs.forEach((job, index) => {
      const row = this.rows.get(job.id) ?? this.#add(job);
      if (this.list.children[index] !== row.item) this.list.insertBefore(row.item, this.list.children[index] ?? null);
      this.#update(row, job, job.id === opened);
    });
  }

  #add(job) {
    const row = {
      status: el("span", { class: "status" }),
      age: el("span", { class: "age" }),
      title: el("span", { class: "title" }),
      strategy: el("span", { class: "strategy", title: parameters(job.spec.strategy) }, job.spec.strategy.name.replaceAll("_", " ")),
      spend: el("span", { class: "spend" }),
      bar: el("i"),
    };
    row.button = el(
      "button", { type: "button", click: () => this.onOpen(job.id) },
      el("span", { class: "top" }, row.status, row.age),
      row.title,
      el("span", { class: "bottom" }, row.strategy, row.spend),
      el("span", { class: "meter", "aria-hidden": "true" }, row.bar),
    );
    row.item = el("li", {}, row.button);
    this.rows.set(job.id, row);
    return row;
  }

  #update(row, job, opened) {
    const { usage, spec } = job;
    const tokens = usage.generated + usage.verifier_computed;
    const { tokens: most, seconds: longest, cost: dearest } = spec.budget;
    const share = Math.max(tokens / (most ?? Infinity), usage.seconds / (longest ?? Infinity), usage.cost / (dearest ?? Infinity));
    put(row.button, "aria-current", opened);
    put(row.status, "data-status", job.status);
    write(row.status, STATUS[job.status]);
    write(row.age, age(job.finished_at ?? job.started_at ?? job.created_at));
    write(row.title, line(question(spec)));
    write(row.spend, most ? `${short(tokens)} / ${short(most)}` : `${short(tokens)} tokens`);
    put(row.bar.parentElement, "data-ended", TERMINAL.has(job.status));
    row.bar.style.setProperty("--share", Math.min(1, share));
  }
}
