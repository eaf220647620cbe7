// The open job: its journal as it arrives, the shown event, the selected step, and the actions on it.

import { attempt, confirmAction } from "./access.js";
import { byId, el, fill, put, write } from "./dom.js";
import { Drawing } from "./drawing.js";
import { readJob } from "./history.js";
import { Outline } from "./outline.js";
import { Replay } from "./replay.js";
import { ROOT, call, follow, key } from "./service.js";
import { drawStep, summaryOf } from "./step.js";
import { BurnDown, drawAnswer, drawVotes } from "./summary.js";
import { Timeline } from "./timeline.js";
import { describeStatus, trustIn } from "./verdict.js";
import { STATUS, TERMINAL, line, modelOf, parameters, question, score } from "./words.js";

const LISTED = "reasoner.outline"; // in session storage: the tree is shown as a list

export class Search {
  /** `history` is the list of jobs; `onAddress(hash)` gets the address of what is open, `onDelete()` is called after a deletion. */
  constructor(history, { onAddress, onDelete }) {
    this.history = history;
    this.onAddress = onAddress;
    this.onDelete = onDelete;
    this.opened = null; // {job, replay, selected, stop}
    this.painting = null;
    this.pick = this.pick.bind(this);
    this.drawing = new Drawing(byId("canvas"), { onPick: this.pick, onHover: (...at) => this.#hover(...at) });
    this.outline = new Outline(byId("outline"), this.pick);
    this.timeline = new Timeline((seq) => this.#seek(seq));
    this.burn = new BurnDown(byId("burn"));
    this.#wire();
  }

  get id() {
    return this.opened?.job.id ?? null;
  }

  async open(id, selected = null) {
    if (this.id === id) return;
    this.opened?.stop.abort();
    const job = this.history.find(id) ?? (await readJob(id));
    if (job === null) this.#miss(id);
    if (!job) return;
    const current = { job, replay: new Replay(), selected, stop: new AbortController() };
    this.opened?.stop.abort();
    this.opened = current;
    this.drawing.clear();
    this.outline.clear();
    this.timeline.clear();
    this.#address();
    byId("search").hidden = false;
    byId("welcome").hidden = true;
    byId("cancel").disabled = false;
    write(byId("question"), question(job.spec));
    write(byId("missing"), "");
    this.history.mark(id);
    this.#paint();
    await attempt(() => this.#listen(current));
  }

  /** Takes a newer state of the open job. */
  update(job) {
    if (this.id !== job.id || job.last_seq < this.opened.job.last_seq) return;
    this.opened.job = job;
    this.#paint();
  }

  leave() {
    this.opened?.stop.abort();
    this.opened = null;
    this.#address();
    byId("search").hidden = true;
    byId("welcome").hidden = false;
    byId("step").replaceChildren();
    this.history.mark(null);
  }

  pick(id) {
    this.opened.selected = id;
    this.#address();
    this.#hover(null);
    this.#draw();
    this.drawing.reveal(id);
    byId("step").querySelector("[data-first]")?.scrollIntoView({ block: "nearest" });
  }

  walk(direction) {
    const to = this.drawing.neighbour(this.#selected(), direction);
    if (to !== null) this.pick(to);
  }

  pickBest() {
    const { best } = this.opened.replay.shown;
    if (best !== null) this.pick(best);
  }

  async cancel() {
    const { job } = this.opened;
    if (TERMINAL.has(job.status) || !(await confirmAction("Cancel this job?", "What it has spent stays on its bill.", "Cancel the job"))) return;
    byId("cancel").disabled = true;
    if (!(await attempt(() => call("POST", `/v1/jobs/${job.id}/cancel`)))) byId("cancel").disabled = false;
  }

  #miss(id) {
    this.leave();
    write(byId("missing"), `There is no job ${id}: it was deleted, or it is not yours.`);
  }

  async #listen(current) {
    try {
      await follow(current.job.id, current.replay.length, {
        signal: current.stop.signal,
        take: (event) => {
          current.replay.take(event);
          if (this.opened === current) this.#paint();
        },
        onConnection: (there) => write(byId("notice"), there ? "" : "The event stream is lost; trying again."),
      });
    } catch (error) {
      if (current.stop.signal.aborted) return;
      throw error;
    }
    if (current.stop.signal.aborted) return;
    current.job = await call("GET", `/v1/jobs/${current.job.id}`);
    if (this.opened === current) this.#paint();
    await this.history.refresh();
  }

  #paint() {
    this.painting ??= requestAnimationFrame(() => {
      this.painting = null;
      if (this.opened) this.#draw();
    });
  }

  #draw() {
    const { job, replay } = this.opened;
    const { shown, newest } = replay;
    const chosen = this.#selected();
    const told = replay.live && shown.status === job.status;
    put(byId("state"), "data-status", shown.status);
    put(byId("state"), "data-trust", told ? trustIn(job) : "");
    write(byId("state"), (told ? describeStatus(job) : STATUS[shown.status]) + (shown.attempt > 1 ? `, attempt ${shown.attempt}` : ""));
    const model = modelOf(job.spec);
    fill(byId("strategy"), el("b", {}, job.spec.strategy.name.replaceAll("_", " ")), [model, parameters(job.spec.strategy)].filter(Boolean).map((part) => ` · ${part}`));
    const ended = TERMINAL.has(newest.status) || TERMINAL.has(job.status);
    byId("cancel").hidden = ended;
    byId("delete").hidden = !ended;
    byId("retry").hidden = job.status !== "failed" || newest.status !== "failed";
    put(byId("compare-with"), "href", `#compare/${job.id}`);
    drawAnswer(byId("answer"), job, shown, this.pick);
    drawVotes(byId("votes"), job, shown, this.pick);
    this.burn.draw(job, replay);
    this.drawing.draw(shown, newest, chosen);
    this.outline.draw(shown, chosen);
    byId("empty").hidden = newest.nodes.size > 0;
    write(byId("empty"), ended ? "The job ended before its first branch." : "The tree grows here as soon as a worker has the job.");
    this.timeline.draw(replay);
    drawStep(byId("step"), shown, chosen, this.pick);
    this.#peek(shown.nodes.get(chosen));
  }

  /** Returns the selected step; by default the chosen leaf, else the best scored one, else the newest. */
  #selected() {
    const { shown } = this.opened.replay;
    if (this.opened.selected !== null && shown.nodes.has(this.opened.selected)) return this.opened.selected;
    if (shown.best !== null) return shown.best;
    let [leader, value] = [null, -Infinity];
    for (const node of shown.nodes.values()) {
      if (node.state !== "pruned" && node.score !== null && node.score > value) [leader, value] = [node.id, node.score];
    }
    return leader ?? [...shown.nodes.keys()].at(-1) ?? null;
  }

  #seek(seq) {
    this.opened.replay.seek(seq);
    this.#draw();
  }

  #address() {
    const { opened } = this;
    this.onAddress(opened ? `#${opened.job.id}${opened.selected === null ? "" : `/${opened.selected}`}` : "");
  }

  #hover(id, x = 0, y = 0) {
    const card = byId("card");
    const node = id === null ? undefined : this.opened?.replay.shown.nodes.get(id);
    card.hidden = !node;
    if (!node) return;
    fill(
      card,
      el("b", {}, node.score === null ? "no score" : score(node.score)), ` ${node.id} · ${node.tokens} tokens · ${node.state}`,
      el("p", {}, line(node.text, 160)),
    );
    const { offsetWidth: width, offsetHeight: height } = card;
    card.style.left = `${Math.min(x + 14, innerWidth - width - 8)}px`;
    card.style.top = `${y + 18 + height > innerHeight ? y - height - 12 : y + 18}px`;
  }

  /** Shows the selected step in one line below the tree, on small screens. */
  #peek(node) {
    const box = byId("peek");
    box.hidden = !node;
    if (node) fill(box, summaryOf(node, 80));
  }

  #wire() {
    const click = (id, action) => byId(id).addEventListener("click", action);
    click("curl", () => this.#copy());
    click("json", () => this.#download());
    click("cancel", () => this.cancel());
    click("retry", () => this.#retry());
    click("delete", () => this.#remove());
    click("closer", () => this.drawing.zoom(1.3));
    click("wider", () => this.drawing.zoom(1 / 1.3));
    click("fit", () => this.drawing.fit());
    click("question", () => byId("question").classList.toggle("open"));
    click("listing", () => this.#list(byId("listing").ariaPressed !== "true"));
    byId("curl").hidden = !navigator.clipboard;
    this.#list(sessionStorage.getItem(LISTED) === "yes");
  }

  /** Shows the tree as a list, or as a drawing; the list stays readable for screen readers. */
  #list(listed) {
    put(byId("listing"), "aria-pressed", listed);
    byId("search").querySelector(".tree").classList.toggle("listed", listed);
    if (listed) sessionStorage.setItem(LISTED, "yes");
    else sessionStorage.removeItem(LISTED);
  }

  /** Retries a failed job, which continues from its journal and pays for nothing twice. */
  async #retry() {
    const current = this.opened;
    const job = await attempt(() => call("POST", `/v1/jobs/${current.job.id}/retry`));
    if (!job) return;
    current.job = job;
    byId("cancel").disabled = false;
    await attempt(() => this.#listen(current));
  }

  async #remove() {
    const { job } = this.opened;
    if (!(await confirmAction("Delete this job?", "Its result, its tree and its journal are gone then.", "Delete the job"))) return;
    const gone = await attempt(async () => (await call("DELETE", `/v1/jobs/${job.id}`)) === null);
    if (!gone) return;
    this.leave();
    this.history.drop(job.id);
    this.onDelete();
  }

  async #copy() {
    const spec = JSON.stringify(this.opened.job.spec).replaceAll("'", "'\\''");
    const authorization = key.get() ? ' -H "Authorization: Bearer $REASONER_API_KEY"' : "";
    const command = `curl -s ${new URL("v1/jobs", ROOT)} -H 'Content-Type: application/json'${authorization} -d '${spec}'`;
    await navigator.clipboard.writeText(command);
    write(byId("curl"), "Copied");
    setTimeout(() => write(byId("curl"), "Copy curl"), 1500);
  }

  #download() {
    const { job, replay } = this.opened;
    const url = URL.createObjectURL(new Blob([JSON.stringify({ job, events: replay.events }, null, 1)], { type: "application/json" }));
    el("a", { href: url, download: `${job.id}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
}
