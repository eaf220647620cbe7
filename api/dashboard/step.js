// The selected step: its score, the solution up to it, and its continuations.

import { el, fill } from "./dom.js";
import { steps, unfold } from "./replay.js";
import { REASON, TERMINAL, line, score, whole } from "./words.js";

const MOST_SHOWN = 40; // continuations

export function drawStep(box, moment, id, onPick) {
  const node = moment.nodes.get(id);
  if (!node) {
    const none = TERMINAL.has(moment.status) ? "There is no branch to show." : "The first branches will show here.";
    const hint = moment.nodes.size ? "Click a branch of the tree, or walk it with the arrow keys." : none;
    fill(box, el("p", { class: "hint" }, hint));
    return;
  }
  const ancestors = moment.ancestors(id);
  fill(
    box, crumbs(node, onPick), head(node, moment), text(ancestors, node, onPick),
    critiques(node), matches(node, onPick), continuations(node, moment, onPick),
  );
}

function crumbs(node, onPick) {
  const parts = node.id.split(".");
  const links = parts.map((part, index) => {
    const id = parts.slice(0, index + 1).join(".");
    const here = id === node.id;
    return el("li", {}, el("button", { type: "button", "aria-current": String(here), click: () => onPick(id), title: `step ${id}` }, part));
  });
  return el("ol", { class: "crumbs", "aria-label": "Path of the step" }, el("li", {}, "problem"), links);
}

function head(node, moment) {
  const known = node.score !== null;
  const mean = node.tokens && !node.given ? Math.exp(node.logprob / node.tokens) : null;
  const state = moment.onFrontier(node) ? "frontier" : node.state;
  const why = moment.onBestPath(node.id) && node.id === moment.best ? "the chosen solution" : (REASON[node.state] ?? node.state);
  return el(
    "div", { class: "head" },
    el("div", { class: known ? "value" : "value none", style: { "--s": node.score ?? 0 } }, el("b", {}, score(node.score)), el("span", {}, known ? "score" : "no score")),
    el(
      "dl", {},
      el("div", {}, el("dt", {}, "state"), el("dd", { class: "state", "data-state": state }, why)),
      el("div", {}, el("dt", {}, "tokens"), el("dd", {}, whole(node.tokens))),
      node.model === null ? null : el("div", {}, el("dt", {}, "model"), el("dd", {}, node.model)),
      mean === null ? null : el("div", {}, el("dt", {}, "mean probability"), el("dd", {}, mean.toFixed(2))),
      ...Object.entries(node.criteria).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, score(value)))),
      node.answer === null ? null : el("div", { class: "says" }, el("dt", {}, node.answer_level === "flexible" ? "last number or letter" : "answer"), el("dd", {}, node.answer)),
    ),
  );
}

/** Returns the solution with the score of each step in the margin; earlier steps are muted. */
function text(ancestors, selected, onPick) {
  const rows = [];
  for (const node of ancestors) {
    const { thought, tokens, closed, rest } = unfold(node);
    if (thought) rows.push(thoughtRow(node, thought, tokens, closed, node === selected));
    const parts = thought && !rest.trim() ? [] : steps(node, rest);
    parts.forEach((part, index) => {
      const known = part.score !== null;
      const shown = part.text.replace(/^\n+|\s+$/g, "");
      const row = el(
        "li", { class: `${node === selected ? "mine" : ""} ${known ? "scored" : "unscored"}`, style: { "--s": part.score ?? 0 } },
        el("button", { type: "button", class: "margin", title: `step ${node.id}`, click: () => onPick(node.id) }, known ? score(part.score) : "·"),
        el("div", {}, shown ? prose(shown) : el("p", {}, "(nothing)")),
      );
      if (node === selected && index === 0 && !thought) row.dataset.first = "";
      rows.push(row);
    });
  }
  return el("section", { class: "solution" }, el("h3", {}, "Solution up to here"), el("ol", {}, rows));
}

/** Returns the paragraphs of a text, with the code that ran and its output set apart. */
function prose(text) {
  return text.split(/^(```(?:python|output)\n[\s\S]*?^```)[^\S\n]*$/m).flatMap((piece) => {
    const block = /^```(python|output)\n([\s\S]*?)\n?```$/.exec(piece);
    if (block) return [el("pre", { class: block[1], title: block[1] === "python" ? "ran in the sandbox" : "printed by the code" }, block[2])];
    return piece.trim() ? [el("p", {}, piece.replace(/^\n+|\s+$/g, ""))] : [];
  });
}

/** Returns a folded thought; one that its limit closed says so. */
function thoughtRow(node, thought, tokens, closed, isSelected) {
  const row = el(
    "li", { class: isSelected ? "mine unscored" : "unscored" },
    el("span", { class: "margin" }, "·"),
    el(
      "details", { class: "thought" },
      el("summary", {}, `Thought, ${whole(tokens)} ${tokens === 1 ? "token" : "tokens"}${closed ? ", closed by the search" : ""}`),
      prose(thought.trim()),
    ),
  );
  if (isSelected) row.dataset.first = "";
  return row;
}

/** Returns the critiques that a verifier wrote before its verdicts, each folded under its own vote. */
function critiques(node) {
  if (!node.verdicts.length) return null;
  return el("section", { class: "solution critiques" }, el("h3", {}, "Critiques"), node.verdicts.flatMap(votesOf));
}

function votesOf({ critiques, votes }) {
  return critiques.map((critique, index) =>
    el(
      "details", {},
      el("summary", {}, votes[index] === null ? "no verdict" : `vote ${score(votes[index])}`),
      el("p", {}, critique || "(nothing)"),
    ),
  );
}

/** Returns the comparisons with other solutions, and what was written about each. */
function matches(node, onPick) {
  if (!node.matches.length) return null;
  const rows = node.matches.slice(0, MOST_SHOWN).map(({ other, score: won, verdicts }) =>
    el(
      "li", {},
      el(
        "button", { type: "button", click: () => onPick(other) },
        el("span", { class: won === null ? "chip none" : "chip", style: { "--s": won ?? 0 } }, score(won)),
        el("span", { class: "words" }, `against ${other}${won === null ? ": no verdict" : ""}`),
      ),
      el("div", { class: "solution" }, verdicts.flatMap(votesOf)),
    ),
  );
  return el("section", { class: "below" }, el("h3", {}, rows.length === 1 ? "One match" : `${node.matches.length} matches`), el("ol", {}, rows));
}

/** Returns the score and the beginning of the text of a step. */
export function summaryOf(node, most) {
  return [
    el("span", { class: node.score === null ? "chip none" : "chip", style: { "--s": node.score ?? 0 } }, score(node.score)),
    el("span", { class: "words" }, line(shortText(node), most) || "(nothing)"),
  ];
}

/** Returns a node's text, with a word for its thought. */
function shortText(node) {
  const { thought, tokens, rest } = unfold(node);
  return thought ? `[thought, ${whole(tokens)} tokens] ${rest}` : rest;
}

function continuations(node, moment, onPick) {
  const below = [...moment.nodes.values()].filter((other) => other.parent === node.id);
  if (!below.length) return null;
  below.sort((a, b) => (b.score ?? -1) - (a.score ?? -1));
  const rows = below.slice(0, MOST_SHOWN).map((child) =>
    el(
      "li", { class: `${child.state === "pruned" ? "pruned" : ""} ${moment.onBestPath(child.id) ? "best" : ""}` },
      el("button", { type: "button", click: () => onPick(child.id) }, summaryOf(child, 90)),
    ),
  );
  const rest = below.length - rows.length;
  return el(
    "section", { class: "below" }, el("h3", {}, `${below.length === 1 ? "One continuation" : `${below.length} continuations`}`),
    el("ol", {}, rows), rest > 0 ? el("p", { class: "hint" }, `and ${whole(rest)} more`) : null,
  );
}
