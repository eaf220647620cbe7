// Two jobs side by side: what they answer and how sure, what they cost, how they differ, and their trees.

import { byId, el, fill, put, svg, write } from "../dom.js";
import { Drawing } from "../drawing.js";
import { readJob } from "../history.js";
import { Replay } from "../replay.js";
import { follow } from "../service.js";
import { describeStatus, findSupport, readAnswer, trustIn } from "../verdict.js";
import { TERMINAL, line, modelOf, money, parameters, question, score, seconds, whole } from "../words.js";
import { hint, refusal, table } from "./view.js";

const ROWS = [
  { name: "confidence", read: ({ result }) => result?.confidence ?? null, tell: score, more: true },
  { name: "tokens", read: ({ usage }) => usage.generated + usage.verifier_computed, tell: whole },
  { name: "generated", read: ({ usage }) => usage.generated, tell: whole },
  { name: "computed by the verifier", read: ({ usage }) => usage.verifier_computed, tell: whole },
  { name: "pruned", read: ({ usage }) => usage.pruned, tell: whole },
  { name: "prompt, cached part", read: ({ usage }) => (usage.prompt ? usage.cached / usage.prompt : null), tell: (share) => `${Math.round(share * 100)} %`, more: true },
  { name: "seconds", read: ({ usage }) => usage.seconds, tell: seconds },
  { name: "cost", read: ({ usage }) => usage.cost || null, tell: money },
];

export class Compare {
  /** `history` is the list of jobs, from which the second one is chosen. */
  constructor(history) {
    this.history = history;
    this.sides = [new Side(byId("side-a")), new Side(byId("side-b"))];
    for (const side of this.sides) side.onChange = () => this.#draw();
    this.sides.forEach((side, index) => side.choice.addEventListener("change", () => this.#choose(index, side.choice.value)));
    byId("swap").addEventListener("click", () => this.#go(this.ids.toReversed()));
  }

  async open(first, second) {
    await this.history.refresh();
    this.ids = [first, second ?? this.#findOther(first)];
    await Promise.all(this.sides.map((side, index) => side.open(this.ids[index])));
    this.#draw();
  }

  close() {
    for (const side of this.sides) side.close();
  }

  /** Returns the newest other job with the same question, if the list has one. */
  #findOther(id) {
    const job = this.history.find(id);
    const others = this.history.jobs.filter((other) => other.id !== id);
    return others.find((other) => job && question(other.spec) === question(job.spec))?.id ?? null;
  }

  #choose(index, id) {
    this.#go(this.ids.with(index, id));
  }

  #go([first, second]) {
    location.hash = `#compare/${first}${second ? `/${second}` : ""}`;
  }

  #draw() {
    this.sides.forEach((side, index) => side.offer(this.history.jobs, this.ids[index]));
    const [a, b] = this.sides.map(({ job }) => job);
    byId("swap").disabled = !(a && b);
    if (!a || !b) return fill(byId("differences"), hint("Choose a second job to compare with."));
    const numbers = ROWS.map((row) => numberRow(row, a, b));
    const specs = differences(a.spec, b.spec).map(([name, ...values]) => [name, ...values.map((value) => el("code", {}, value))]);
    fill(
      byId("differences"),
      table(["Measure", ["A", "number"], ["B", "number"], ["B against A", "number"]], numbers, "Results and costs of both jobs"),
      el("h3", {}, specs.length ? "Settings that differ" : "All settings are the same"),
      specs.length ? table(["Setting", "A", "B"], specs, "Settings that differ") : null,
    );
  }
}

/** One of the two jobs, followed until it ends. */
class Side {
  constructor(box) {
    this.box = box;
    this.choice = box.querySelector("select");
    this.summary = box.querySelector(".summary");
    this.empty = box.querySelector(".empty");
    const canvas = svg("svg", { role: "img", "aria-label": "Search tree" });
    box.querySelector(".small-tree").prepend(canvas);
    this.canvas = canvas;
    this.drawing = new Drawing(canvas, { onPick: (id) => (location.hash = `#${this.job.id}/${id}`), onHover: () => {} });
    this.job = null;
  }

  async open(id) {
    this.close();
    if (this.job?.id === id && TERMINAL.has(this.job.status)) return;
    this.job = null;
    this.drawing.clear();
    fill(this.summary, id ? hint("Reading the job …") : null);
    if (!id) return;
    const stop = new AbortController();
    this.stop = stop;
    const job = await readJob(id);
    if (stop.signal.aborted) return;
    if (!job) return fill(this.summary, refusal(`There is no job ${id}: it was deleted, or it is not yours.`));
    this.job = job;
    this.replay = new Replay();
    this.#draw();
    this.#listen(stop.signal);
  }

  close() {
    this.stop?.abort();
  }

  /** Lists the jobs that can be chosen. */
  offer(jobs, chosen) {
    const listed = jobs.some(({ id }) => id === chosen) || !chosen ? jobs : [{ id: chosen, spec: this.job?.spec }, ...jobs];
    const options = listed.map(({ id, spec }) => el("option", { value: id }, spec ? `${line(question(spec), 60)} · ${spec.strategy.name.replaceAll("_", " ")} · ${id.slice(4, 10)}` : id));
    fill(this.choice, chosen ? null : el("option", { value: "" }, "Choose a job"), options);
    this.choice.value = chosen ?? "";
  }

  async #listen(signal) {
    let waiting = null;
    const paint = () => {
      waiting = null;
      if (!signal.aborted) this.#draw();
    };
    try {
      const take = (event) => {
        this.replay.take(event);
        waiting ??= requestAnimationFrame(paint);
      };
      await follow(this.job.id, 0, { signal, take, onConnection: () => {} });
      const ended = signal.aborted ? null : await readJob(this.job.id);
      if (!ended || signal.aborted) return;
      this.job = ended;
      this.#draw();
      this.onChange();
    } catch (error) {
      if (!signal.aborted) fill(this.summary, refusal(error.message));
    }
  }

  #draw() {
    const { job, replay } = this;
    const answer = readAnswer(job);
    const sure = job.result?.confidence ?? null;
    const trust = trustIn(job);
    fill(
      this.summary,
      el("p", { class: "line" }, el("a", { href: `#${job.id}`, class: "status", "data-status": job.status, "data-trust": trust }, describeStatus(job)), el("span", { class: "note" }, [job.spec.strategy.name.replaceAll("_", " "), modelOf(job.spec)].filter(Boolean).join(" · "))),
      el("p", { class: "title" }, line(question(job.spec), 300)),
      el("p", { class: answer === null ? "answer none" : "answer", "data-trust": trust }, answer ?? "no answer", sure === null ? null : el("span", { class: "chip", title: `confidence ${score(sure)}`, style: { "--s": findSupport(job) } }, score(sure))),
      job.error ? el("p", { class: "facts error" }, job.error.message) : null,
    );
    const { newest } = replay;
    this.drawing.draw(newest, newest, newest.best);
    put(this.canvas, "aria-label", `Search tree of ${newest.nodes.size} branches`);
    this.empty.hidden = newest.nodes.size > 0;
    write(this.empty, TERMINAL.has(job.status) ? "no branch" : "the tree grows here");
  }
}

function numberRow({ name, read, tell, more }, a, b) {
  const values = [read(a), read(b)];
  const told = values.map((value) => (value === null ? "–" : tell(value)));
  const known = values.every((value) => value !== null);
  const better = known && told[0] !== told[1] ? ((values[0] > values[1]) === Boolean(more) ? 0 : 1) : null;
  const cells = told.map((text, index) => [el(index === better ? "b" : "span", {}, text), "number"]);
  const ratio = more ? signed(values[1] - values[0]) : values[0] > 0 ? `${(values[1] / values[0]).toFixed(2)} ×` : "";
  return [name, ...cells, [known ? (told[0] === told[1] ? "the same" : ratio) : "", "number"]];
}

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;

/** Returns the fields of two specifications that differ: [path, value of the first, value of the second]. */
function differences(first, second, path = "") {
  if (path === "strategy" || first === null || second === null || typeof first !== "object" || typeof second !== "object") {
    const told = [first, second].map((value) => (path === "strategy" ? `${value.name} ${parameters(value)}` : tellValue(value)));
    return told[0] === told[1] ? [] : [[path, ...told]];
  }
  const names = [...new Set([...Object.keys(first), ...Object.keys(second)])];
  return names.flatMap((name) => differences(first[name] ?? null, second[name] ?? null, path ? `${path}.${name}` : name));
}

function tellValue(value) {
  if (value === null) return "–";
  return line(typeof value === "string" ? value : JSON.stringify(value), 160);
}
