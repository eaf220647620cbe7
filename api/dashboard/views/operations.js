// The service: its queue and how long jobs wait, tokens a second, engines, cost by owner and day, and keys.

import { byId, el, fill, svg } from "../dom.js";
import { parseMetrics, quantile, sumOf } from "../metrics.js";
import { call, read } from "../service.js";
import { moment, money, seconds, short, whole } from "../words.js";
import { Polling, hint, refusal, request, table, tile } from "./view.js";

const POLL = 5_000;
const SAMPLES = 120; // rates that the curve has
const DAYS = 14;
const MOST_OWNERS = 20;
const KINDS = { generated: "generated", verifier_computed: "computed by verifiers", prompt: "prompt", cached: "of it cached", pruned: "pruned" };

export class Operations {
  constructor() {
    this.rates = []; // tokens a second between two reads
    this.before = null;
    this.polling = new Polling(() => this.#refresh(), POLL);
  }

  open() {
    return this.polling.start();
  }

  close() {
    this.polling.stop();
    this.before = null;
  }

  async #refresh() {
    await Promise.all([this.#readMetrics(), this.#readUsage(), this.#readKeys()]);
  }

  async #readMetrics() {
    const [answer, ready] = await Promise.all([request(() => read("/metrics")), call("GET", "/readyz").catch((error) => ({ reason: error.message }))]);
    if (answer?.refused) {
      fill(byId("load"), refusal(answer.refused));
      fill(byId("engines"), hint("Engines are among the metrics."));
      return;
    }
    if (!answer) return;
    const samples = parseMetrics(answer.data);
    this.#measureRate(samples);
    fill(byId("load"), ready.reason ? refusal(`Not ready: ${ready.reason}`) : null, el("div", { class: "tiles" }, this.#tiles(samples)));
    fill(byId("engines"), engines(samples, ready.engines ?? []));
  }

  #measureRate(samples) {
    const tokens = (sumOf(samples, "reasoner_tokens_total", { kind: "generated" }) ?? 0) + (sumOf(samples, "reasoner_tokens_total", { kind: "verifier_computed" }) ?? 0);
    const now = performance.now() / 1000;
    if (this.before && now > this.before.now) this.rates = [...this.rates, Math.max(0, tokens - this.before.tokens) / (now - this.before.now)].slice(-SAMPLES);
    this.before = { tokens, now };
  }

  #tiles(samples) {
    const jobs = (status) => sumOf(samples, "reasoner_jobs", { status }) ?? 0;
    const wait = [0.5, 0.95].map((part) => quantile(samples, "reasoner_queue_wait_seconds", part));
    const cap = sumOf(samples, "reasoner_queue_cap");
    const memory = sumOf(samples, "reasoner_broker_memory_bytes");
    const dead = sumOf(samples, "reasoner_dead_jobs") ?? 0;
    const rate = this.rates.at(-1);
    const rates = tile("tokens a second", rate === undefined ? "…" : short(Math.round(rate)), rate === undefined ? "measured at the next reading" : "generated and computed by verifiers");
    if (this.rates.length > 1) rates.append(curve(this.rates));
    rates.classList.add("wide");
    return [
      tile("queued", whole(jobs("queued")), cap === null ? "waiting for a worker" : `of ${whole(cap)} that may wait`),
      tile("running", whole(jobs("in_progress")), "searches at work"),
      tile("wait", wait[0] === null ? "–" : seconds(wait[0]), wait[0] === null ? "no job has been taken yet" : `median; 95 % below ${seconds(wait[1])}`),
      tile("ended", whole(jobs("completed") + jobs("incomplete") + jobs("cancelled") + jobs("failed")), `${whole(jobs("completed"))} completed, ${whole(jobs("failed"))} failed${dead ? `, ${whole(dead)} of them gave up` : ""}`),
      rates,
      el(
        "div", { class: "tile wide" }, el("h3", {}, "tokens so far"),
        el("dl", { class: "kinds" }, Object.entries(KINDS).map(([kind, name]) => pair(name, short(sumOf(samples, "reasoner_tokens_total", { kind }) ?? 0))), memory === null ? null : pair("memory of Redis", `${short(Math.round(memory / 2 ** 20))} MiB`)),
      ),
    ];
  }

  async #readUsage() {
    const usage = await request(() => call("GET", `/v1/usage?days=${DAYS}`));
    if (usage?.refused) fill(byId("usage"), refusal(usage.refused));
    else if (usage) fill(byId("usage"), spending(usage.data.data));
  }

  async #readKeys() {
    const keys = await request(() => call("GET", "/v1/keys?limit=100"));
    if (keys?.refused) fill(byId("key-list"), refusal(keys.refused));
    else if (keys) fill(byId("key-list"), listKeys(keys.data));
  }
}

const pair = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));

function curve(values) {
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, index) => `${index} ${(1 - value / most).toFixed(3)}`);
  const drawn = svg("path", { class: "curve", d: `M${points.join("L")}` });
  return svg("svg", { viewBox: `0 -0.05 ${values.length - 1} 1.1`, preserveAspectRatio: "none", "aria-hidden": "true" }, drawn);
}

function engines(samples, states) {
  const names = [...new Set([...states.map(({ engine }) => engine), ...(samples.get("reasoner_engine_up") ?? []).map(({ labels }) => labels.engine)])];
  if (!names.length) return hint("No engine has been asked yet.");
  const rows = names.map((engine) => {
    const state = states.find((other) => other.engine === engine);
    const up = state ? state.state === "up" : sumOf(samples, "reasoner_engine_up", { engine }) === 1;
    return [
      el("span", { class: "status", "data-status": up ? "completed" : "failed", "data-trust": up ? "likely" : "" }, state?.state ?? (up ? "up" : "away")),
      el("code", {}, engine),
      [whole(sumOf(samples, "reasoner_engine_requests_total", { engine }) ?? 0), "number"],
      [whole(sumOf(samples, "reasoner_engine_failures_total", { engine }) ?? 0), "number"],
      state?.reason ?? "",
    ];
  });
  return table(["State", "Engine", ["Requests", "number"], ["Failures", "number"], "Reason"], rows, "Engines");
}

/** Returns a table of owners with their tokens, cost and jobs, and a bar for each day. */
function spending(rows) {
  if (!rows.length) return hint(`No job has ended in the last ${DAYS} days.`);
  const today = Date.now();
  const days = Array.from({ length: DAYS }, (_, index) => new Date(today - (DAYS - 1 - index) * 86_400_000).toISOString().slice(0, 10));
  const priced = rows.some(({ cost }) => cost > 0);
  const owners = [...Map.groupBy(rows, ({ owner }) => owner)].map(([owner, spent]) => ({ owner, spent, ...total(spent) }));
  owners.sort((a, b) => (priced ? b.cost - a.cost : b.tokens - a.tokens));
  const worth = (row) => (priced ? row.cost : row.tokens);
  const most = Math.max(...rows.map(worth), 1e-12);
  const listed = owners.slice(0, MOST_OWNERS).map(({ owner, spent, jobs, tokens, cost }) => [
    el("b", {}, owner), [whole(jobs), "number"], [short(tokens), "number"], [priced ? money(cost) : "–", "number"],
    el("span", { class: "days", role: "img", "aria-label": days.map((day) => tell(day, spent, priced)).filter(Boolean).join("; ") }, days.map((day) => {
      const row = spent.find((other) => other.day === day);
      return el("i", { title: tell(day, spent, priced) || `${day}: nothing`, style: { "--share": row ? worth(row) / most : 0 } });
    })),
  ]);
  const all = total(rows);
  listed.push([el("span", { class: "hint" }, "all"), [whole(all.jobs), "number"], [short(all.tokens), "number"], [priced ? money(all.cost) : "–", "number"], el("span", { class: "hint" }, `${days[0]} to ${days.at(-1)}, UTC`)]);
  return table(["Owner", ["Jobs", "number"], ["Tokens", "number"], ["Cost", "number"], priced ? "Cost by day" : "Tokens by day"], listed, "Usage by owner and day");
}

function total(rows) {
  const sum = (name) => rows.reduce((all, row) => all + row[name], 0);
  return { jobs: sum("jobs"), tokens: sum("tokens"), cost: sum("cost") };
}

function tell(day, spent, priced) {
  const row = spent.find((other) => other.day === day);
  return row ? `${day}: ${whole(row.tokens)} tokens${priced ? `, cost ${money(row.cost)}` : ""}` : "";
}

function listKeys({ data, has_more: more }) {
  if (!data.length) return hint("There are no stored keys; make one with: reasoner keys create NAME");
  const now = Date.now() / 1000;
  const rows = data.map((key) => {
    const gone = key.revoked_at ? `revoked ${moment(key.revoked_at)}` : key.expires_at && key.expires_at < now ? `expired ${moment(key.expires_at)}` : null;
    return [
      el("b", { class: gone ? "gone" : null }, key.name), key.owner, key.scopes.join(", "), key.models?.join(", ") ?? "all", moment(key.created_at),
      gone ?? (key.expires_at ? `expires ${moment(key.expires_at)}` : "valid"),
    ];
  });
  return [table(["Name", "Owner", "Scopes", "Models", "Made", "State"], rows, "API keys"), more ? hint("The newest 100; reasoner keys list has the others.") : null];
}
