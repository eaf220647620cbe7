// A job's journal and what it amounts to at any of its events: the tree, the bill and the state at that moment.

import { TERMINAL } from "./words.js";

/** What a job was after its first `seq` events. */
export class Moment {
  constructor() {
    this.seq = 0;
    this.status = "queued";
    this.attempt = 0;
    this.nodes = new Map();
    this.best = null;
    this.last = null;
    this.spent = { tokens: 0, generated: 0, verifier_computed: 0, pruned: 0, cached: 0, seconds: 0, cost: 0, flops: 0 };
  }

  get running() {
    return this.status === "in_progress";
  }

  take(event) {
    this.seq = event.seq;
    this.last = event;
    for (const [name, value] of Object.entries(event.spend)) this.spent[name] = (this.spent[name] ?? 0) + value;
    this.spent.tokens = this.spent.generated + this.spent.verifier_computed;
    const { type, data } = event;
    if (type === "node") this.#grow(data);
    else if (type === "score") this.#score(data);
    else if (type === "prune") for (const id of data.nodes) this.nodes.get(id).state = "pruned";
    else if (type === "select") this.best = data.node;
    else if (type === "job.started" || type === "job.resumed") {
      this.status = "in_progress";
      this.attempt = data.attempt;
    } else if (type === "job.queued") this.status = "queued";
    else if (TERMINAL.has(type.replace("job.", ""))) {
      this.status = type.replace("job.", "");
      if (type === "job.cancelled") this.best = data.result?.node ?? null;
    }
  }

  /** From below the problem, or from where its conversation began, to this node. */
  lineage(id) {
    const nodes = [];
    for (let node = this.nodes.get(id); node; node = node.fresh ? undefined : this.nodes.get(node.parent)) nodes.push(node);
    return nodes.reverse();
  }

  /** Where the search may go on now: branches that grow, and finished steps that nobody continued or gave up. */
  onFrontier(node) {
    return this.running && (node.state === "live" || ((node.state === "step" || node.state === "said") && !node.children));
  }

  onBestPath(id) {
    return this.best !== null && (this.best === id || this.best.startsWith(`${id}.`));
  }

  #grow(data) {
    let node = this.nodes.get(data.node);
    if (!node) {
      node = {
        id: data.node, parent: data.parent, text: "", tokens: 0, logprob: 0, scores: [], score: null,
        state: "live", reason: null, answer: null, children: 0, fresh: data.fresh ?? false, undone: data.undone ?? 0,
      };
      this.nodes.set(node.id, node);
      const parent = this.nodes.get(node.parent);
      if (parent) parent.children += 1;
    }
    node.text += data.text; // a branch may arrive in parts
    node.tokens += data.tokens;
    node.logprob += data.logprob;
    if (data.final) {
      node.state = node.reason = data.reason;
      node.answer = data.answer;
    }
  }

  #score(data) {
    const node = this.nodes.get(data.node);
    node.scores = node.scores.concat(data.scores);
    node.score = data.score;
  }
}

/** All events so far, and two moments: the newest, and the one that is shown. */
export class Replay {
  constructor() {
    this.events = [];
    this.newest = new Moment();
    this.shown = new Moment();
    this.series = []; // what had been spent after each event
    this.live = true;
  }

  get length() {
    return this.events.length;
  }

  take(event) {
    delete event.data.token_ids; // nothing here reads them, and they are most of a journal
    delete event.data.confidence;
    this.events.push(event);
    this.newest.take(event);
    this.series.push({ ...this.newest.spent });
    if (this.live) this.shown.take(event);
  }

  /** Shows the moment after event `seq`; the newest one is live again. */
  seek(seq) {
    const wanted = Math.max(Math.min(1, this.length), Math.min(this.length, Math.round(seq)));
    if (wanted < this.shown.seq) this.shown = new Moment();
    for (const event of this.events.slice(this.shown.seq, wanted)) this.shown.take(event);
    this.live = wanted === this.length;
  }
}

/** A node's text in the steps that its scores belong to: `[{text, score}]`. The last one may have none yet. */
export function steps(node) {
  if (node.scores.length <= 1 && !node.text.trimEnd().includes("\n\n")) {
    return [{ text: node.text, score: node.scores.length ? node.scores[0] : null }];
  }
  const pieces = cut(node.text, "\n\n");
  const fitting = pieces.length >= node.scores.length ? pieces : cut(node.text, "\n");
  if (fitting.length < node.scores.length) return [{ text: node.text, score: node.score }];
  return fitting.map((text, index) => ({ text, score: node.scores[index] ?? null }));
}

function cut(text, separator) {
  const pieces = [];
  for (const part of text.split(separator)) {
    if (part.trim()) pieces.push(part);
  }
  return pieces;
}
