// The list of jobs, newest first: question, answer and confidence, model and strategy, and what was spent.

import { el, put, write } from "./dom.js";
import { describeStatus, findSupport, readAnswer, trustIn } from "./verdict.js";
import { TERMINAL, age, line, modelOf, parameters, question, score, short } from "./words.js";

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
    const { strategy } = job.spec;
    const model = modelOf(job.spec);
    const row = {
      status: el("span", { class: "status" }),
      age: el("span", { class: "age" }),
      title: el("span", { class: "title" }),
      said: el("span", { class: "said" }),
      confidence: el("span", { class: "chip" }),
      strategy: el("span", { class: "strategy", title: parameters(strategy) }, strategy.name.replaceAll("_", " ")),
      model: el("span", { class: "model", title: model }, model),
      spend: el("span", { class: "spend" }),
      bar: el("i"),
    };
    row.answer = el("span", { class: "found" }, row.said, row.confidence);
    row.button = el(
      "button", { type: "button", click: () => this.onOpen(job.id) },
      el("span", { class: "top" }, row.status, row.age),
      row.title, row.answer,
      el("span", { class: "bottom" }, row.strategy, model && row.model, row.spend),
      el("span", { class: "meter", "aria-hidden": "true" }, row.bar),
    );
    row.item = el("li", {}, row.button);
    this.rows.set(job.id, row);
    return row;
  }

  #update(row, job, opened) {
    const { usage, spec, result } = job;
    const tokens = usage.generated + usage.verifier_computed;
    const { tokens: most, seconds: longest, cost: dearest } = spec.budget;
    const share = Math.max(tokens / (most ?? Infinity), usage.seconds / (longest ?? Infinity), usage.cost / (dearest ?? Infinity));
    put(row.button, "aria-current", opened);
    put(row.status, "data-status", job.status);
    put(row.status, "data-trust", trustIn(job));
    write(row.status, describeStatus(job));
    write(row.age, age(job.finished_at ?? job.started_at ?? job.created_at));
    write(row.title, line(question(spec)));
    const answer = readAnswer(job);
    row.answer.hidden = answer === null;
    put(row.answer, "data-trust", trustIn(job));
    write(row.said, line(answer ?? "", 60));
    const sure = result?.confidence ?? null;
    row.confidence.hidden = sure === null;
    write(row.confidence, score(sure));
    row.confidence.title = sure === null ? "" : `confidence ${score(sure)}`;
    row.confidence.style.setProperty("--s", findSupport(job) ?? 0);
    write(row.spend, most ? `${short(tokens)} / ${short(most)}` : `${short(tokens)} tokens`);
    put(row.bar.parentElement, "data-ended", TERMINAL.has(job.status));
    row.bar.style.setProperty("--share", Math.min(1, share));
  }
}
