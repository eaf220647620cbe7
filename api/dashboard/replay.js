// A job's journal, and snapshots of it after any event: tree, bill and status.

import { TERMINAL } from "./words.js";

/** The state of a job after its first `seq` events. */
export class Snapshot {
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
    else if (type === "compare") this.#compare(data);
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

  /** Returns the nodes from the root, or from where a new conversation began, to this node. */
  ancestors(id) {
    const nodes = [];
    for (let node = this.nodes.get(id); node; node = node.fresh ? undefined : this.nodes.get(node.parent)) nodes.push(node);
    return nodes.reverse();
  }

  /** Returns true for branches in generation, and for finished steps that are neither continued nor pruned. */
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
        state: "live", reason: null, answer: null, answer_level: null, children: 0, fresh: data.fresh ?? false, undone: data.undone ?? 0, parts: [],
        given: data.given ?? false, model: data.model ?? null, verdicts: [], criteria: {}, matches: [],
      };
      this.nodes.set(node.id, node);
      const parent = this.nodes.get(node.parent);
      if (parent) parent.children += 1;
    }
    node.text += data.text; // a branch may arrive in segments
    node.tokens += data.tokens;
    node.logprob += data.logprob;
    node.parts = data.parts ?? node.parts; // of the whole text so far
    if (data.final) {
      node.state = node.reason = data.reason;
      node.answer = data.answer;
      node.answer_level = data.answer === null ? null : (data.answer_level ?? "strict");
    }
  }

  #score(data) {
    const node = this.nodes.get(data.node);
    node.scores = node.scores.concat(data.scores);
    node.score = data.score;
    node.verdicts = (data.verdicts ?? []).flat();
    node.criteria = data.criteria ?? {};
  }

  #compare({ nodes: [first, second], score, verdicts = [] }) {
    this.nodes.get(first).matches.push({ other: second, score, verdicts });
    this.nodes.get(second).matches.push({ other: first, score: score === null ? null : 1 - score, verdicts });
  }
}

/** All events so far, and two snapshots: the newest, and the shown one. */
export class Replay {
  constructor() {
    this.events = [];
    this.newest = new Snapshot();
    this.shown = new Snapshot();
    this.series = []; // the totals spent after each event
    this.live = true;
  }

  get length() {
    return this.events.length;
  }

  take(event) {
    delete event.data.token_ids; // unused here, and most of a journal
    delete event.data.confidence;
    this.events.push(event);
    this.newest.take(event);
    this.series.push({ ...this.newest.spent });
    if (this.live) this.shown.take(event);
  }

  /** Shows the snapshot after event `seq`; at the newest event it is live again. */
  seek(seq) {
    const target = Math.max(Math.min(1, this.length), Math.min(this.length, Math.round(seq)));
    if (target < this.shown.seq) this.shown = new Snapshot();
    for (const event of this.events.slice(this.shown.seq, target)) this.shown.take(event);
    this.live = target === this.length;
  }
}

/** Splits a node's text into its thought, if it has one, and the rest; lengths of parts count code points. */
export function unfold(node) {
  const thoughts = node.parts.filter(([kind]) => kind === "thought");
  if (!thoughts.length) return { thought: "", tokens: 0, closed: false, rest: node.text };
  const chars = thoughts.reduce((sum, part) => sum + part[2], 0);
  const tokens = thoughts.reduce((sum, part) => sum + (part[1] === "generated" ? part[3] : 0), 0);
  const text = Array.from(node.text);
  return {
    thought: text.slice(0, chars).join(""), tokens, rest: text.slice(chars).join(""),
    closed: thoughts.some((part) => part[1] === "injected"),
  };
}

/** Splits a node's text into the steps of its scores: `[{text, score}]`. The last step may have no score yet. */
export function steps(node, text = node.text) {
  if (node.scores.length <= 1 && !text.trimEnd().includes("\n\n")) {
    return [{ text, score: node.scores.length ? node.scores[0] : null }];
  }
  const pieces = cut(text, "\n\n");
  const fitting = pieces.length >= node.scores.length ? pieces : cut(text, "\n");
  if (fitting.length < node.scores.length) return [{ text, score: node.score }];
  return fitting.map((text, index) => ({ text, score: node.scores[index] ?? null }));
}

const cut = (text, separator) => text.split(separator).filter((part) => part.trim());
