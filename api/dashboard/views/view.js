// What all views share: reading again while one is open, tables, tiles, and messages of what cannot be shown.

import { attemptOrRefuse } from "../access.js";
import { el } from "../dom.js";
import { Refusal } from "../service.js";

/** Runs an action now and then every `milliseconds`, never twice at once, while the page is visible and until `stop`. */
export class Polling {
  constructor(action, milliseconds) {
    this.action = action;
    this.milliseconds = milliseconds;
  }

  start() {
    this.stop();
    this.timer = setInterval(() => this.run(), this.milliseconds);
    return this.run();
  }

  stop() {
    clearInterval(this.timer);
  }

  async run() {
    if (document.hidden || this.running) return;
    this.running = true;
    try {
      await this.action();
    } finally {
      this.running = false;
    }
  }
}

/** Returns `{data}` or `{refused}` of a request; nothing if it failed in another way, which the page shows. */
export async function request(action) {
  const answer = await attemptOrRefuse(action);
  if (answer === undefined) return undefined;
  return answer instanceof Refusal ? { refused: answer.message } : { data: answer };
}

/** Returns a table with headings; cells are texts or elements, and `[text, "number"]` is aligned to the right. */
export function table(headings, rows, caption) {
  const cell = (tag, value) => {
    const [content, kind] = Array.isArray(value) ? value : [value, null];
    return el(tag, { class: kind, scope: tag === "th" ? "col" : null }, content ?? "–");
  };
  return el(
    "div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table", {},
      el("caption", { class: "hidden" }, caption),
      el("thead", {}, el("tr", {}, headings.map((heading) => cell("th", heading)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value) => cell("td", value))))),
    ),
  );
}

export const tile = (name, value, note) => el("div", { class: "tile" }, el("h3", {}, name), el("b", {}, value), el("span", { class: "note" }, note ?? ""));

export const hint = (text) => el("p", { class: "hint" }, text);

export const refusal = (text) => el("p", { class: "refused" }, text);

/** Returns a bar of parts `{name, share, kind}`, whose shares of the whole add up to at most 1. */
export function bar(parts, label) {
  const shown = parts.filter(({ share }) => share > 0);
  return el(
    "div", { class: "bar-of-parts", role: "img", "aria-label": label },
    shown.map(({ name, share, kind }) => el("i", { title: name, "data-kind": kind, style: { "--share": share } })),
  );
}
