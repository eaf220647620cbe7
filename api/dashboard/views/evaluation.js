// An evaluation: the files that `reasoner eval --out` wrote, read in the browser and sent nowhere.

import { byId, el, fill, svg, write } from "../dom.js";
import { line, short, whole } from "../words.js";
import { hint, refusal, table } from "./view.js";

const CEILING = "pass@n";
const [WIDTH, HEIGHT] = [760, 400];
const MARGIN = { left: 46, right: 150, top: 14, bottom: 40 };
const MOST_PROBLEMS = 200;
const LABEL = 13; // pixels between two labels of one column
const LABEL_WIDTH = 140;

export class Evaluation {
  constructor() {
    this.results = null; // {title, rows, problems}
    this.chosen = null;
    byId("results").addEventListener("change", ({ target }) => this.#read([...target.files]));
    const box = byId("evaluation");
    box.addEventListener("dragover", (event) => event.preventDefault());
    box.addEventListener("drop", (event) => {
      event.preventDefault();
      this.#read([...event.dataTransfer.files]);
    });
  }

  open() {}

  close() {}

  async #read(files) {
    if (!files.length) return;
    try {
      const texts = await Promise.all(files.map((file) => file.text()));
      const read = files.map(({ name }, index) => (name.endsWith(".jsonl") ? readRuns(name, texts[index]) : readResults(name, texts[index])));
      this.results = join(read);
    } catch (error) {
      fill(byId("curves"), refusal(error.message));
      return;
    }
    this.most = MOST_PROBLEMS;
    this.chosen = best(this.results.rows);
    this.#draw();
  }

  #draw() {
    const { title, rows, problems } = this.results;
    const names = [...new Set(rows.map(({ name }) => name))];
    const choose = (name) => {
      this.chosen = name;
      this.#draw();
      byId("curves").querySelector(`[data-strategy="${CSS.escape(name)}"]`)?.focus();
    };
    write(byId("suite"), title);
    fill(
      byId("curves"),
      el(
        "div", { class: "plot" }, chart(rows, names, this.chosen),
        el("div", { class: "series", role: "group", "aria-label": "Strategies" }, names.map((name) =>
          el("button", { type: "button", "data-strategy": name, "aria-pressed": String(name === this.chosen), click: () => choose(name) }, name),
        )),
      ),
      el("section", { class: "panel" }, el("h3", {}, "Accuracy and tokens of a problem"), table(
        ["Strategy", ["N", "number"], ["Accuracy", "number"], ["95 % interval", "number"], ["Tokens", "number"], ["of the verifier", "number"], ["Seconds", "number"]],
        rows.map((row) => [
          row.name === this.chosen ? el("b", {}, row.name) : row.name, [String(row.n), "number"], [row.accuracy.toFixed(3), "number"],
          [row.low === null ? "–" : `${row.low.toFixed(3)} to ${row.high.toFixed(3)}`, "number"], [short(Math.round(row.total)), "number"],
          [short(Math.round(row.verifier_tokens)), "number"], [row.seconds.toFixed(2), "number"],
        ]),
        "Accuracy and tokens by strategy",
      )),
      el("section", { class: "panel" }, el("h3", {}, "Each problem"), this.#problems(problems)),
    );
  }

  /** Returns the table of problems, hardest first: how often each strategy is right at its largest N. */
  #problems(problems) {
    if (!problems.length) return hint("Open runs.jsonl of the same folder, too, to see each problem.");
    const names = [...new Set(problems.flatMap(({ right }) => [...right.keys()]))];
    const shown = problems.slice(0, this.most);
    const rows = shown.map(({ id, right }) => [el("code", {}, line(id, 40)), ...names.map((name) => (right.has(name) ? [cell(right.get(name)), "number"] : "–"))]);
    const rest = problems.length - shown.length;
    const more = () => {
      this.most += MOST_PROBLEMS;
      this.#draw();
    };
    return [
      table(["Problem", ...names.map((name) => [name, "number"])], rows, "How often each strategy is right on each problem"),
      rest > 0 ? el("button", { type: "button", class: "link", click: more }, `and ${whole(rest)} more`) : null,
    ];
  }
}

const cell = (share) => el("span", { class: "chip", style: { "--s": share } }, share === 0 || share === 1 ? String(share) : share.toFixed(2));

/** Reads results.json. Throws an error that says what it should be. */
function readResults(name, text) {
  const document = parse(name, text);
  if (!Array.isArray(document.rows) || !document.rows.every(({ strategy, accuracy, tokens }) => strategy && accuracy !== undefined && tokens !== undefined)) {
    throw new Error(`${name} is not of an evaluation: open the results.json or runs.jsonl that 'reasoner eval --out FOLDER' writes`);
  }
  const model = document.settings?.model ?? document.rows[0]?.model;
  const rows = document.rows.map((row) => ({ ...row, name: nameOf(row, model), total: row.tokens + row.verifier_tokens }));
  return { title: `${document.suite}, ${whole(document.problems)} problems${model ? `, ${model}` : ""}`, rows, problems: [] };
}

/** Reads runs.jsonl: a header, then a line for each problem of each stage. Throws as `readResults` does. */
function readRuns(name, text) {
  const [first, ...lines] = text.split("\n").filter((each) => each.trim());
  const header = parse(name, first ?? "");
  const runs = lines.flatMap((each, index) => parse(`${name}, line ${index + 2}`, each).runs ?? []);
  if (!runs.length) throw new Error(`${name} has no runs: open the runs.jsonl that 'reasoner eval --out FOLDER' writes`);
  const groups = Map.groupBy(runs, (run) => JSON.stringify([nameOf(run, header.model), run.n]));
  const rows = [...groups].map(([key, of]) => {
    const [named, n] = JSON.parse(key);
    const mean = (field) => of.reduce((sum, run) => sum + run[field], 0) / of.length;
    const [tokens, verifier_tokens] = [mean("tokens"), mean("verifier_tokens")];
    return { name: named, n, accuracy: mean("correct"), low: null, high: null, tokens, verifier_tokens, total: tokens + verifier_tokens, seconds: mean("seconds") };
  });
  const most = new Map(rows.map((row) => [row.name, Math.max(...rows.filter(({ name: other }) => other === row.name).map(({ n }) => n))]));
  const problems = [...Map.groupBy(runs, ({ problem }) => problem)].map(([id, of]) => {
    const largest = of.filter((run) => run.n === most.get(nameOf(run, header.model)));
    const right = new Map([...Map.groupBy(largest, (run) => nameOf(run, header.model))].map(([named, all]) => [named, all.reduce((sum, run) => sum + run.correct, 0) / all.length]));
    return { id, right, ease: [...right.values()].reduce((sum, share) => sum + share, 0) / right.size };
  });
  problems.sort((a, b) => a.ease - b.ease || a.id.localeCompare(b.id));
  return { title: `${header.suite}, ${whole(problems.length)} problems, ${header.model}`, rows, problems };
}

const nameOf = ({ strategy, model }, own) => (!model || !own || model === own ? strategy : `${strategy} of ${model}`);

function parse(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON (${error.message}): open the files that 'reasoner eval --out FOLDER' writes`);
  }
}

/** Joins both files of one evaluation: rows with intervals from the results, problems from the runs. */
function join(read) {
  const rows = read.find((part) => part.rows.some(({ low }) => low !== null)) ?? read[0];
  return { title: rows.title, rows: rows.rows, problems: read.find(({ problems }) => problems.length)?.problems ?? [] };
}

/** Returns the strategy with the highest accuracy. */
function best(rows) {
  return rows.filter(({ name }) => name !== CEILING).toSorted((a, b) => b.accuracy - a.accuracy || a.total - b.total)[0]?.name ?? rows[0].name;
}

/** Returns the chart of accuracy against tokens on a logarithmic scale; the chosen strategy has its intervals and the accent. */
function chart(rows, names, chosen) {
  const totals = rows.map(({ total }) => Math.max(1, total));
  const [least, most] = [Math.min(...totals), Math.max(...totals)].map(Math.log10);
  const bottom = Math.max(0, Math.floor((Math.min(...rows.map(({ accuracy, low }) => low ?? accuracy)) - 0.02) * 10) / 10);
  const top = Math.min(1, Math.ceil((Math.max(...rows.map(({ accuracy, high }) => high ?? accuracy)) + 0.01) * 10) / 10);
  const x = (tokens) => MARGIN.left + ((Math.log10(Math.max(1, tokens)) - least) / Math.max(1e-9, most - least)) * (WIDTH - MARGIN.left - MARGIN.right);
  const y = (accuracy) => HEIGHT - MARGIN.bottom - ((accuracy - bottom) / Math.max(1e-9, top - bottom)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const series = names.map((name) => ({ name, points: rows.filter((row) => row.name === name).toSorted((a, b) => a.total - b.total) }));
  series.sort((a, b) => (a.name === chosen) - (b.name === chosen)); // the chosen one is drawn last, above the others
  const labels = placeLabels(series.map(({ name, points }) => ({ name, at: y(points.at(-1).accuracy), x: x(points.at(-1).total) })), chosen);
  const told = rows.filter(({ name }) => name === chosen).map(({ n, accuracy, total }) => `N ${n}: accuracy ${accuracy.toFixed(3)} at ${Math.round(total)} tokens`).join("; ");
  return svg(
    "svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `Accuracy against tokens. ${chosen}: ${told}` },
    axes({ least, most, bottom, top, x, y }),
    series.map(({ name, points }) => curve(name, points, name === chosen, x, y)),
    labels.map(({ name, at, x: from }) => svg("text", { class: `label ${name === chosen ? "chosen" : ""}`, x: Math.min(from, WIDTH - MARGIN.right) + 8, y: at + 4 }, line(name, 22))),
  );
}

function curve(name, points, isChosen, x, y) {
  const path = points.map(({ total, accuracy }) => `${x(total).toFixed(1)} ${y(accuracy).toFixed(1)}`).join("L");
  const bars = isChosen ? points.filter(({ low }) => low !== null).map(({ total, low, high }) => svg("path", { class: "interval", d: `M${x(total).toFixed(1)} ${y(low).toFixed(1)}V${y(high).toFixed(1)}` })) : [];
  const dots = points.map((row) => svg("circle", { cx: x(row.total).toFixed(1), cy: y(row.accuracy).toFixed(1), r: isChosen ? 4.5 : 3 }, svg("title", {}, `${name}, N ${row.n}: ${row.accuracy.toFixed(3)} at ${whole(row.total)} tokens`)));
  return svg("g", { class: `line ${isChosen ? "chosen" : ""} ${name === CEILING ? "ceiling" : ""}` }, bars, svg("path", { d: `M${path}` }), dots);
}

function axes({ least, most, bottom, top, x, y }) {
  const steps = [1, 2, 5].flatMap((step) => Array.from({ length: 9 }, (_, power) => step * 10 ** power));
  const ticks = steps.filter((tokens) => Math.log10(tokens) >= least - 1e-9 && Math.log10(tokens) <= most + 1e-9).toSorted((a, b) => a - b);
  const levels = Array.from({ length: 11 }, (_, index) => index / 10).filter((level) => level >= bottom - 1e-9 && level <= top + 1e-9);
  const [right, base] = [WIDTH - MARGIN.right, HEIGHT - MARGIN.bottom];
  return svg(
    "g", { class: "axes" },
    levels.map((level) => [svg("path", { d: `M${MARGIN.left} ${y(level)}H${right}` }), svg("text", { x: MARGIN.left - 8, y: y(level) + 4, class: "end" }, level.toFixed(1))]),
    ticks.map((tokens) => [svg("path", { d: `M${x(tokens)} ${base}v5` }), svg("text", { x: x(tokens), y: base + 18, class: "middle" }, short(tokens))]),
    svg("text", { x: (MARGIN.left + right) / 2, y: HEIGHT - 6, class: "middle" }, "tokens a problem, the verifier's included"),
  );
}

/** Moves labels apart that would overlap; those that find no room near their curve are left out, but not the chosen one's. */
function placeLabels(labels, chosen) {
  const placed = [];
  for (const label of labels.toSorted((a, b) => (b.name === chosen) - (a.name === chosen) || a.at - b.at)) {
    const free = [0, 1, -1, 2, -2, 3, -3].map((step) => label.at + step * LABEL).find((at) => at > 8 && at < HEIGHT - MARGIN.bottom && placed.every((other) => Math.abs(other.at - at) >= LABEL || Math.abs(other.x - label.x) >= LABEL_WIDTH));
    if (free !== undefined) placed.push({ ...label, at: free });
  }
  return placed;
}
