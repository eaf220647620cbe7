// The answer, the votes, and the remaining budget.

import { el, fill, put, svg, write } from "./dom.js";
import { findSupport, trustIn } from "./verdict.js";
import { STATUS, TERMINAL, flops, line, money, score, seconds, short, whole } from "./words.js";

const RESOURCES = [
  { name: "tokens", unit: "tokens", told: short },
  { name: "seconds", unit: "seconds", told: seconds },
  { name: "cost", unit: "cost", told: money },
  { name: "flops", unit: "FLOPs", told: flops },
];
const ENDS = {
  answer: "the search is done",
  budget: "the budget ended the search",
  no_answer: "no candidate states an answer",
  cancelled: "cancelled: the best so far",
  engine_unavailable: "its engine failed for too long: the best so far",
};
const MOST_VOTES = 4;
const POINTS = 240; // of a curve
const RATE_SECONDS = 10; // seconds over which the pace is measured

/** Draws the answer of a job at a snapshot. */
export function drawAnswer(box, job, moment, onPick) {
  const ended = TERMINAL.has(moment.status) && moment.seq === job.last_seq;
  const result = ended ? job.result : null;
  const best = moment.best === null ? undefined : moment.nodes.get(moment.best);
  const answer = result ? result.answer : (best?.answer ?? null);
  const facts = [];
  const sure = result?.confidence ?? null;
  const trust = result ? trustIn(job) : "";
  if (trust === "doubtful") facts.push("doubtful: its confidence or its score is near 0");
  if (result) facts.push(ENDS[result.finish_reason]);
  if (result?.abstained) facts.push(`${whole(result.abstained)} without an answer`);
  if (result?.answer_level === "flexible") facts.push("not stated as the answer: the last in the solution");
  if (result?.note) facts.push(result.note);
  const error = ended && job.error;
  if (error) facts.push(error.message);
  if (!ended) facts.push(moment.status === "queued" ? (moment.last?.data.detail ?? "waiting for a worker") : `${moment.nodes.size} branches so far`);
  fill(
    box,
    el("h3", {}, "Answer", sure === null ? null : el("span", { class: "sure" }, "confidence ", el("span", { class: "chip", style: { "--s": findSupport(job) } }, score(sure)))),
    el("p", { class: answer === null ? "answer none" : "answer", "data-trust": trust }, answer ?? (ended ? STATUS[moment.status] : "…")),
    el("p", { class: error ? "facts error" : "facts" }, facts.join(" · ")),
    best ? el("button", { type: "button", class: "link", click: () => onPick(best.id) }, `step ${best.id}`) : null,
  );
}

/** Draws the votes: those of the job once it has ended, before that counts of identical answers. */
export function drawVotes(box, job, moment, onPick) {
  const ended = TERMINAL.has(moment.status) && moment.seq === job.last_seq;
  if (ended && job.result?.ranking?.length) return drawRanking(box, job.result.ranking, onPick);
  const stated = [...moment.nodes.values()].filter((node) => node.answer !== null);
  const strict = stated.filter((node) => node.answer_level === "strict");
  const candidates = strict.length ? strict : stated; // as in the search's own votes
  const counted = ended && job.result?.votes.length ? job.result.votes : tally(candidates);
  const weighed = counted.some((vote) => Math.abs(vote.weight - vote.count) > 1e-9);
  const votes = counted.toSorted((a, b) => b.weight - a.weight || b.count - a.count);
  const most = Math.max(...votes.map((vote) => vote.weight), 1e-9);
  const rows = votes.slice(0, MOST_VOTES).map((vote, index) => {
    const behind = candidates.filter((node) => node.answer.trim() === vote.answer.trim());
    const first = behind.toSorted((a, b) => (b.score ?? 0) - (a.score ?? 0))[0];
    const told = weighed ? `${vote.count} × · ${vote.weight.toFixed(2)}` : `${vote.count} ×`;
    return el(
      "li", {},
      el(
        "button", { type: "button", class: index === 0 ? "first" : "", disabled: !first, click: () => onPick(first.id) },
        el("span", { class: "said" }, line(vote.answer, 60)),
        el("span", { class: "count" }, told),
        el("i", { "aria-hidden": "true", style: { "--share": vote.weight / most } }),
      ),
    );
  });
  const rest = votes.length - rows.length;
  fill(
    box,
    el("h3", {}, ended ? (job.result?.votes.length ? "Votes" : "Answers found") : "Answers so far"),
    rows.length ? el("ol", {}, rows) : el("p", { class: "facts" }, ended ? "none" : "none yet"),
    rest > 0 ? el("p", { class: "facts" }, `and ${whole(rest)} more`) : null,
  );
}

/** Draws the ranking of the client's own candidates. */
function drawRanking(box, ranking, onPick) {
  const told = ({ score: own, share, best }) => score(best ?? share ?? own);
  const rows = ranking.slice(0, MOST_VOTES).map((item, index) =>
    el(
      "li", {},
      el(
        "button", { type: "button", class: index === 0 ? "first" : "", click: () => onPick(item.node) },
        el("span", { class: "said" }, `${item.index}: ${line(item.answer ?? "(no answer)", 56)}`),
        el("span", { class: "count" }, told(item)),
        el("i", { "aria-hidden": "true", style: { "--share": item.best ?? item.share ?? item.score ?? 0 } }),
      ),
    ),
  );
  const rest = ranking.length - rows.length;
  fill(box, el("h3", {}, "Ranking"), el("ol", {}, rows), rest > 0 ? el("p", { class: "facts" }, `and ${whole(rest)} more`) : null);
}

function tally(candidates) {
  const groups = Map.groupBy(candidates, (node) => node.answer.trim());
  return [...groups].map(([answer, { length }]) => ({ answer, count: length, weight: length }));
}

/** Draws what is left of each limit over the job's events, or what was spent if there is no limit. */
export class BurnDown {
  constructor(box) {
    this.box = box;
    this.charts = new Map();
  }

  draw(job, replay) {
    const { budget } = job.spec;
    const wanted = RESOURCES.filter(({ name }) => name !== "flops" || budget.flops !== null);
    if (wanted.map(({ name }) => name).join() !== [...this.charts.keys()].join()) {
      this.charts = new Map(wanted.map((resource) => [resource.name, chart(resource)]));
      this.box.replaceChildren(...[...this.charts.values()].map(({ figure }) => figure));
    }
    for (const resource of wanted) this.#draw(resource, budget[resource.name], replay, job);
  }

  #draw({ name, unit, told }, limit, replay, job) {
    const { figure, value, note, area, curve, now } = this.charts.get(name);
    const spent = replay.shown.spent[name];
    write(value, told(spent));
    const free = name === "cost" && limit === null && !job.usage.cost;
    write(note, limit !== null ? `of ${told(limit)}${pace(name, limit, replay)}` : free ? "no prices are set" : "no limit");
    figure.classList.toggle("low", limit !== null && spent / limit > 0.9);
    figure.title = `${unit}: ${told(spent)} spent${limit === null ? "" : `, ${told(Math.max(0, limit - spent))} left`}`;
    const { series } = replay;
    const most = limit ?? Math.max(series.at(-1)?.[name] ?? 0, 1e-12);
    const height = (index) => {
      const gone = index < 0 ? 0 : series[index][name] / most;
      return (limit === null ? gone : Math.max(0, 1 - gone)).toFixed(4);
    };
    const stride = Math.max(1, Math.ceil(series.length / POINTS));
    const points = [`0 ${height(-1)}`];
    for (let index = stride - 1; index < series.length; index += stride) points.push(`${index + 1} ${height(index)}`);
    if (series.length % stride) points.push(`${series.length} ${height(series.length - 1)}`);
    const width = Math.max(1, series.length);
    put(area.ownerSVGElement, "viewBox", `0 0 ${width} 1`);
    put(curve, "d", `M${points.join("L")}`);
    put(area, "d", `M${points.join("L")}L${width} 0L0 0Z`);
    put(now, "d", `M${replay.shown.seq} ${height(replay.shown.seq - 1)}h0`);
  }
}

/** "· 12 s left at this pace", while the job runs. */
function pace(name, limit, replay) {
  const { shown, series, live } = replay;
  if (!live || !shown.running || series.length < 4) return "";
  const end = series.at(-1);
  const start = series.findLast((point) => end.seconds - point.seconds > RATE_SECONDS) ?? series[0];
  const rate = (end[name] - start[name]) / (end.seconds - start.seconds);
  if (!(rate > 0) || !Number.isFinite(rate)) return "";
  return ` · ${seconds((limit - end[name]) / rate)} left`;
}

function chart({ name, unit }) {
  const value = el("b");
  const note = el("span", { class: "note" });
  const area = svg("path", { class: "area" });
  const curve = svg("path", { class: "curve" });
  const now = svg("path", { class: "now" });
  const flipped = svg("g", { transform: "matrix(1 0 0 -1 0 1)" }, area, curve, now);
  const drawn = svg("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" }, flipped);
  const figure = el("figure", { "data-resource": name }, el("figcaption", {}, el("h3", {}, unit), value, note), drawn);
  return { figure, value, note, area, curve, now };
}
