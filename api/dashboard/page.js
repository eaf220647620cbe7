// The page: its views and their addresses, the health of the service, the keyboard, and the theme.

import { attempt, wireKeys } from "./access.js";
import { byId, el, put, write } from "./dom.js";
import { SubmitForm } from "./form.js";
import { History } from "./history.js";
import { Search } from "./search.js";
import { Refusal, call, key } from "./service.js";
import { Batches } from "./views/batches.js";
import { Compare } from "./views/compare.js";
import { Evaluation } from "./views/evaluation.js";
import { Operations } from "./views/operations.js";

const POLL = 2_000;
const HEALTH = 10_000;
const THEMES = ["", "light", "dark"];
const JOB = "job_[0-9a-f]{32}";

const history = new History({ onOpen: open, onUpdate: (job) => search.update(job) });
const search = new Search(history, { onAddress: address, onDelete: () => show("jobs") });
const form = new SubmitForm((job) => {
  history.add(job);
  open(job.id);
});

/** Views besides the jobs: an address each, and an object with `open(...parts of the address)` and `close()`. */
const VIEWS = [
  { name: "batches", address: /^#(?:batches|(batch_[0-9a-f]{32}))$/, page: new Batches() },
  { name: "compare", address: new RegExp(`^#compare/(${JOB})(?:/(${JOB}))?$`), page: new Compare(history) },
  { name: "evaluation", address: /^#evaluation$/, page: new Evaluation() },
  { name: "service", address: /^#service$/, page: new Operations() },
];
let view = null; // the open one of them; the jobs without one

/** Shows what the address names. Returns false if that is no job. */
function navigate() {
  const [, id, step] = new RegExp(`^#(${JOB})(?:/([\\d.]+))?$`).exec(location.hash) ?? [];
  const found = VIEWS.map((other) => [other, other.address.exec(location.hash)]).find(([, match]) => match);
  const next = found?.[0] ?? null;
  if (view !== next) view?.page.close();
  view = next;
  document.body.dataset.view = view?.name ?? "jobs";
  for (const link of document.querySelectorAll(".views a")) put(link, "aria-current", link.dataset.view === document.body.dataset.view ? "page" : "false");
  if (found) view.page.open(...found[1].slice(1));
  else if (id) open(id, step ?? null);
  else if (search.id) address(`#${search.id}`);
  else history.refresh();
  return Boolean(found || id);
}

function open(id, step = null) {
  if (view) {
    location.hash = `#${id}`;
    return;
  }
  show("search");
  search.open(id, step);
}

/** Writes the address of the open job, unless another view is open. */
function address(hash) {
  if (!view && location.hash !== hash) window.history.replaceState(null, "", hash || location.pathname);
}

async function checkHealth() {
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
  n: () => attempt(() => form.open()),
  t: () => turnTheme(1),
  "?": () => byId("shortcuts").showModal(),
};
const LIST_KEYS = {
  j: () => openNeighbour(1),
  k: () => openNeighbour(-1),
  "/": () => {
    show("jobs");
    byId("query").focus();
  },
};
const JOB_KEYS = {
  ArrowLeft: () => search.walk("left"),
  ArrowRight: () => search.walk("right"),
  ArrowUp: () => search.walk("up"),
  ArrowDown: () => search.walk("down"),
  b: () => search.pickBest(),
  " ": () => search.timeline.toggle(),
  ",": () => search.timeline.step(-1),
  ".": () => search.timeline.step(1),
  Home: () => search.timeline.start(),
  End: () => search.timeline.end(),
  "+": () => search.drawing.zoom(1.3),
  "=": () => search.drawing.zoom(1.3),
  "-": () => search.drawing.zoom(1 / 1.3),
  f: () => search.drawing.fit(),
  l: () => byId("listing").click(),
  c: () => search.cancel(),
};

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const { target } = event;
  if (target.closest("input, select, textarea")) return;
  // Space presses a button focused by the keyboard, but not one that has the focus from a click.
  if (event.key === " " && target.closest("button, summary, a") && target.matches(":focus-visible")) return;
  const action = KEYS[event.key] ?? (view ? null : (LIST_KEYS[event.key] ?? (search.opened && JOB_KEYS[event.key])));
  if (!action) return;
  event.preventDefault();
  action();
}

function openNeighbour(by) {
  const next = history.neighbour(by);
  if (next) open(next);
}

function refresh() {
  if (!view) history.refresh();
}

function wire() {
  const click = (id, action) => byId(id).addEventListener("click", action);
  click("new", () => attempt(() => form.open()));
  click("first", () => attempt(() => form.open()));
  click("theme", () => turnTheme(1));
  click("help", () => byId("shortcuts").showModal());
  click("peek", () => show("step"));
  for (const button of document.querySelectorAll(".tabs button")) button.addEventListener("click", () => show(button.dataset.to));
  for (const dialog of document.querySelectorAll("dialog")) {
    for (const button of dialog.querySelectorAll(".close")) button.addEventListener("click", () => dialog.close(""));
  }
  wireKeys(begin);
  byId("ramp").append(...Array.from({ length: 20 }, (_, index) => el("i", { style: { "--s": index / 19 } })));
  document.addEventListener("keydown", press);
  document.addEventListener("visibilitychange", () => {
    refresh();
    checkHealth();
  });
  addEventListener("hashchange", navigate);
  setInterval(refresh, POLL);
  setInterval(checkHealth, HEALTH);
}

async function begin() {
  byId("forget").hidden = key.get() === null;
  checkHealth();
  await history.refresh();
  if (byId("keys").open) return;
  if (!navigate() && history.jobs.length && matchMedia("(min-width: 900px)").matches) open(history.jobs[0].id);
}

wire();
turnTheme(0);
show("jobs");
begin();
