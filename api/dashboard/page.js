// The state of the page: the open job, the shown event, the selected step; and the updates of all parts.

import { byId, el, fill, put, write } from "./dom.js";
import { Drawing } from "./drawing.js";
import { SubmitForm } from "./form.js";
import { JobList } from "./jobs.js";
import { Replay } from "./replay.js";
import { Refusal, call, follow, key } from "./service.js";
import { drawStep, summaryOf } from "./step.js";
import { BurnDown, drawAnswer, drawVotes } from "./summary.js";
import { Timeline } from "./timeline.js";
import { STATUS, TERMINAL, line, parameters, question, score } from "./words.js";

const POLL = 2_000;
const HEALTH = 10_000;
const PAGE = 50;
const THEMES = ["", "light", "dark"];

let jobs = [];
let more = false; // true if there are older jobs than those in the list
let opened = null; // {job, replay, selected, stop}: the job that is open
let painting = null;
let refreshing = false;

const list = new JobList(byId("list"), (id) => open(id));
const drawing = new Drawing(byId("canvas"), { onPick: pick, onHover: hover });
const timeline = new Timeline(seek);
const burn = new BurnDown(byId("burn"));
const form = new SubmitForm((job) => {
  jobs = [job, ...jobs.filter((other) => other.id !== job.id)];
  open(job.id);
});

// The list of jobs, and the health of the service.

async function refresh() {
  if (document.hidden || refreshing) return;
  refreshing = true;
  await readNewest();
  refreshing = false;
}

async function readNewest() {
  const status = byId("status").value;
  const page = await attempt(() => call("GET", `/v1/jobs?limit=${PAGE}${status && `&status=${status}`}`));
  if (!page || status !== byId("status").value) return;
  const last = page.data.at(-1)?.created_at ?? Infinity;
  const fresh = new Set(page.data.map((job) => job.id));
  const older = page.has_more ? jobs.filter((job) => job.created_at <= last && !fresh.has(job.id)) : [];
  if (!older.length) more = page.has_more;
  listed([...page.data, ...older]);
  const current = opened && page.data.find((job) => job.id === opened.job.id);
  if (current && current.last_seq >= opened.job.last_seq) {
    opened.job = current;
    paint();
  }
}

async function readOlder() {
  const status = byId("status").value;
  const page = await attempt(() => call("GET", `/v1/jobs?limit=${PAGE}&after=${jobs.at(-1).id}${status && `&status=${status}`}`));
  if (!page) return;
  more = page.has_more;
  const known = new Set(jobs.map((job) => job.id));
  listed([...jobs, ...page.data.filter((job) => !known.has(job.id))]);
}

function listed(all) {
  jobs = all;
  list.draw(jobs, opened?.job.id);
  byId("older").hidden = !more;
  byId("nojobs").hidden = jobs.length > 0 || byId("status").value !== "";
}

async function health() {
  if (document.hidden) return;
  const box = byId("service");
  try {
    await call("GET", "/readyz");
    put(box, "data-ready", "yes");
    write(box, "ready");
    box.title = "broker and engine answer";
  } catch (error) {
    put(box, "data-ready", "no");
    write(box, error instanceof Refusal ? "not ready" : "away");
    box.title = error.message;
  }
}

/** Runs a request; shows its failure, or the prompt for a missing key. */
async function attempt(action) {
  try {
    const answer = await action();
    write(byId("notice"), "");
    return answer;
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) askForKey();
    else write(byId("notice"), error instanceof Refusal ? error.message : "The service does not answer; trying again.");
    return undefined;
  }
}

// The open job.

async function open(id, selected = null) {
  show("search");
  if (opened?.job.id === id) return;
  opened?.stop.abort();
  const known = jobs.find((job) => job.id === id);
  const job = known ?? (await attempt(() => find(id)));
  if (!job) return;
  const current = { job, replay: new Replay(), selected, stop: new AbortController() };
  opened?.stop.abort();
  opened = current;
  drawing.clear();
  timeline.clear();
  address();
  byId("search").hidden = false;
  byId("welcome").hidden = true;
  byId("cancel").disabled = false;
  write(byId("question"), question(job.spec));
  write(byId("missing"), "");
  list.draw(jobs, id);
  byId("list").querySelector("[aria-current=true]")?.scrollIntoView({ block: "nearest" });
  paint();
  await attempt(() => listen(current));
}

/** Opens a job that is not in the list. If it does not exist, the open job is closed, since the address names another. */
async function find(id) {
  try {
    return await call("GET", `/v1/jobs/${id}`);
  } catch (error) {
    if (!(error instanceof Refusal) || error.status !== 404) throw error;
    leave();
    write(byId("missing"), `There is no job ${id}: it was deleted, or it is not yours.`);
    return null;
  }
}

/** Closes the open job. */
function leave() {
  opened?.stop.abort();
  opened = null;
  address();
  byId("search").hidden = true;
  byId("welcome").hidden = false;
  byId("step").replaceChildren();
  list.draw(jobs, null);
}

async function listen(current) {
  try {
    await follow(current.job.id, current.replay.length, {
      signal: current.stop.signal,
      take(event) {
        current.replay.take(event);
        if (opened === current) paint();
      },
      onConnection: (there) => write(byId("notice"), there ? "" : "The event stream is lost; trying again."),
    });
  } catch (error) {
    if (current.stop.signal.aborted) return;
    throw error;
  }
  if (current.stop.signal.aborted) return;
  current.job = await call("GET", `/v1/jobs/${current.job.id}`);
  if (opened === current) paint();
  await refresh();
}

function paint() {
  painting ??= requestAnimationFrame(() => {
    painting = null;
    if (opened) draw();
  });
}

function draw() {
  const { job, replay } = opened;
  const { shown, newest } = replay;
  const chosen = selected();
  put(byId("state"), "data-status", shown.status);
  write(byId("state"), STATUS[shown.status] + (shown.attempt > 1 ? `, attempt ${shown.attempt}` : ""));
  fill(byId("strategy"), el("b", {}, job.spec.strategy.name.replaceAll("_", " ")), ` ${parameters(job.spec.strategy)}`);
  const ended = TERMINAL.has(newest.status) || TERMINAL.has(job.status);
  byId("cancel").hidden = ended;
  byId("delete").hidden = !ended;
  byId("retry").hidden = job.status !== "failed" || newest.status !== "failed";
  drawAnswer(byId("answer"), job, shown, pick);
  drawVotes(byId("votes"), job, shown, pick);
  burn.draw(job, replay);
  drawing.draw(shown, newest, chosen);
  byId("empty").hidden = newest.nodes.size > 0;
  write(byId("empty"), ended ? "The job ended before its first branch." : "The tree grows here as soon as a worker has the job.");
  put(byId("canvas"), "aria-label", `Search tree: ${shown.nodes.size} branches${chosen ? `, ${chosen} selected` : ""}`);
  timeline.draw(replay);
  drawStep(byId("step"), shown, chosen, pick);
  peek(shown.nodes.get(chosen));
}

/** Returns the selected step; by default the chosen leaf, else the best scored one, else the newest. */
function selected() {
  const { shown } = opened.replay;
  if (opened.selected !== null && shown.nodes.has(opened.selected)) return opened.selected;
  if (shown.best !== null) return shown.best;
  let [leader, value] = [null, -Infinity];
  for (const node of shown.nodes.values()) {
    if (node.state !== "pruned" && node.score !== null && node.score > value) [leader, value] = [node.id, node.score];
  }
  return leader ?? [...shown.nodes.keys()].at(-1) ?? null;
}

function pick(id) {
  opened.selected = id;
  address();
  hover(null);
  draw();
  drawing.reveal(id);
  byId("step").querySelector("[data-first]")?.scrollIntoView({ block: "nearest" });
}

function seek(seq) {
  opened.replay.seek(seq);
  draw();
}

function walk(direction) {
  const from = selected();
  const to = drawing.neighbour(from, direction);
  if (to !== null) pick(to);
}

function address() {
  const where = opened ? `#${opened.job.id}${opened.selected === null ? "" : `/${opened.selected}`}` : location.pathname;
  if (location.hash !== where) history.replaceState(null, "", where);
}

function hover(id, x = 0, y = 0) {
  const card = byId("card");
  const node = id === null ? undefined : opened?.replay.shown.nodes.get(id);
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
function peek(node) {
  const box = byId("peek");
  box.hidden = !node;
  if (!node) return;
  fill(box, summaryOf(node, 80));
}

// User actions.

async function cancel() {
  const { job } = opened;
  if (TERMINAL.has(job.status) || !(await sure("Cancel this job?", "What it has spent stays on its bill.", "Cancel the job"))) return;
  byId("cancel").disabled = true;
  if (!(await attempt(() => call("POST", `/v1/jobs/${job.id}/cancel`)))) byId("cancel").disabled = false;
}

/** Retries a failed job, which continues from its journal and pays for nothing twice. */
async function retry() {
  const current = opened;
  const job = await attempt(() => call("POST", `/v1/jobs/${current.job.id}/retry`));
  if (!job) return;
  current.job = job;
  byId("cancel").disabled = false;
  await attempt(() => listen(current));
}

async function remove() {
  const { job } = opened;
  if (!(await sure("Delete this job?", "Its result, its tree and its journal are gone then.", "Delete the job"))) return;
  const gone = await attempt(async () => (await call("DELETE", `/v1/jobs/${job.id}`)) === null);
  if (!gone) return;
  leave();
  listed(jobs.filter((other) => other.id !== job.id));
  show("jobs");
}

async function copy() {
  const spec = JSON.stringify(opened.job.spec).replaceAll("'", "'\\''");
  const authorization = key.get() ? ' -H "Authorization: Bearer $REASONER_API_KEY"' : "";
  const command = `curl -s ${location.origin}/v1/jobs -H 'Content-Type: application/json'${authorization} -d '${spec}'`;
  await navigator.clipboard.writeText(command);
  write(byId("curl"), "Copied");
  setTimeout(() => write(byId("curl"), "Copy curl"), 1500);
}

function download() {
  const { job, replay } = opened;
  const url = URL.createObjectURL(new Blob([JSON.stringify({ job, events: replay.events }, null, 1)], { type: "application/json" }));
  el("a", { href: url, download: `${job.id}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function sure(title, text, yes) {
  const dialog = byId("sure-dialog");
  write(byId("sure-title"), title);
  write(byId("sure-text"), text);
  write(dialog.querySelector("[type=submit]"), yes);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

function askForKey() {
  const dialog = byId("keys");
  write(dialog.querySelector(".refused"), key.get() ? "That key is not one of this service's." : "");
  if (!dialog.open) dialog.showModal();
  byId("forget").hidden = true;
}

function useKey() {
  const given = byId("key").value.trim();
  if (!given) return;
  key.set(given);
  byId("key").value = "";
  byId("keys").close();
  begin();
}

function show(tab) {
  document.body.dataset.tab = tab;
  for (const button of document.querySelectorAll(".tabs button")) put(button, "aria-current", button.dataset.to === tab);
}

function turnTheme(by) {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "") + by) % THEMES.length];
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  if (theme) localStorage.setItem("reasoner.theme", theme);
  else localStorage.removeItem("reasoner.theme");
  const told = `Theme: ${theme || "as the system"} (t)`;
  put(byId("theme"), "aria-label", told);
  byId("theme").title = told;
}

const KEYS = {
  j: () => neighbourJob(1),
  k: () => neighbourJob(-1),
  n: () => attempt(() => form.open()),
  t: () => turnTheme(1),
  "?": () => byId("shortcuts").showModal(),
};
const JOB_KEYS = {
  ArrowLeft: () => walk("left"),
  ArrowRight: () => walk("right"),
  ArrowUp: () => walk("up"),
  ArrowDown: () => walk("down"),
  b: () => opened.replay.shown.best !== null && pick(opened.replay.shown.best),
  " ": () => timeline.toggle(),
  ",": () => timeline.step(-1),
  ".": () => timeline.step(1),
  Home: () => timeline.start(),
  End: () => timeline.end(),
  "+": () => drawing.zoom(1.3),
  "=": () => drawing.zoom(1.3),
  "-": () => drawing.zoom(1 / 1.3),
  f: () => drawing.fit(),
  c: () => cancel(),
};

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const { target } = event;
  if (target.closest("input, select, textarea")) return;
  // Space presses a button focused by the keyboard, but not one that has the focus from a click.
  if (event.key === " " && target.closest("button, summary") && target.matches(":focus-visible")) return;
  const action = KEYS[event.key] ?? (opened && JOB_KEYS[event.key]);
  if (!action) return;
  event.preventDefault();
  action();
}

function neighbourJob(by) {
  if (!jobs.length) return;
  const index = jobs.findIndex((job) => job.id === opened?.job.id);
  const next = jobs[index < 0 ? 0 : Math.min(jobs.length - 1, Math.max(0, index + by))];
  open(next.id);
}

/** Opens the job in the address; returns false if there is none. */
function navigate() {
  const [, id, step] = /^#(job_[0-9a-f]{32})(?:\/([\d.]+))?$/.exec(location.hash) ?? [];
  if (id) open(id, step ?? null);
  return Boolean(id);
}

function wire() {
  const click = (id, action) => byId(id).addEventListener("click", action);
  click("new", () => attempt(() => form.open()));
  click("first", () => attempt(() => form.open()));
  click("older", readOlder);
  click("theme", () => turnTheme(1));
  click("help", () => byId("shortcuts").showModal());
  click("curl", copy);
  click("json", download);
  click("cancel", cancel);
  click("retry", retry);
  click("delete", remove);
  click("closer", () => drawing.zoom(1.3));
  click("wider", () => drawing.zoom(1 / 1.3));
  click("fit", () => drawing.fit());
  click("peek", () => show("step"));
  click("question", () => byId("question").classList.toggle("open"));
  click("forget", () => {
    key.forget();
    location.reload();
  });
  byId("curl").hidden = !navigator.clipboard;
  byId("status").addEventListener("change", () => {
    jobs = [];
    refresh();
  });
  for (const button of document.querySelectorAll(".tabs button")) button.addEventListener("click", () => show(button.dataset.to));
  for (const dialog of document.querySelectorAll("dialog")) {
    for (const button of dialog.querySelectorAll(".close")) button.addEventListener("click", () => dialog.close(""));
  }
  byId("keys").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey();
  });
  byId("sure-dialog").addEventListener("submit", (event) => {
    event.preventDefault();
    byId("sure-dialog").close("yes");
  });
  byId("ramp").append(...Array.from({ length: 20 }, (_, index) => el("i", { style: { "--s": index / 19 } })));
  document.addEventListener("keydown", press);
  document.addEventListener("visibilitychange", () => {
    refresh();
    health();
  });
  addEventListener("hashchange", navigate);
  setInterval(refresh, POLL);
  setInterval(health, HEALTH);
}

async function begin() {
  byId("forget").hidden = key.get() === null;
  health();
  await refresh();
  if (byId("keys").open) return;
  if (!navigate() && jobs.length && matchMedia("(min-width: 900px)").matches) open(jobs[0].id);
}

wire();
turnTheme(0);
show("jobs");
begin();
