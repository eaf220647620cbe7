// The filters of the list of jobs, as parameters of GET /v1/jobs.

import { byId, el, put, write } from "./dom.js";
import { call } from "./service.js";

const TYPING = 300; // milliseconds without a key after which a text is searched for

export class Filters {
  constructor(onChange) {
    this.form = byId("filters");
    this.more = byId("more-filters");
    this.onChange = onChange;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#change(0);
    });
    this.form.addEventListener("input", () => this.#change(TYPING));
    this.more.addEventListener("toggle", () => this.#offer(), { once: true });
    byId("clear").addEventListener("click", () => this.clear());
  }

  /** Returns the parameters of the filters in use. */
  read() {
    const query = new URLSearchParams();
    for (const { name, value, type } of this.form.querySelectorAll("[name]")) {
      const text = value.trim();
      if (!text) continue;
      if (name === "metadata") for (const [key, wanted] of readPairs(text)) query.append(`metadata[${key}]`, wanted);
      else if (type === "datetime-local") query.append(name, new Date(text).getTime() / 1000);
      else query.append(name, text);
    }
    return query;
  }

  clear() {
    this.form.reset();
    this.#change(0);
  }

  #change(pause) {
    clearTimeout(this.timer);
    const folded = [...this.more.querySelectorAll("[name]")].filter(({ value }) => value.trim()).length;
    write(byId("more-count"), folded ? `Filters · ${folded}` : "Filters");
    byId("clear").hidden = !this.read().size;
    this.timer = setTimeout(() => this.onChange(), pause);
  }

  /** Offers the strategies and models of the service, when the filters are first unfolded. */
  async #offer() {
    const [strategies, models] = await Promise.all(["strategies", "models"].map((kind) => call("GET", `/v1/${kind}`).catch(() => ({ data: [] }))));
    byId("known-strategies").replaceChildren(...strategies.data.map(({ name }) => el("option", { value: name })));
    byId("known-models").replaceChildren(...models.data.filter(({ stands_for: names }) => !names).map(({ id }) => el("option", { value: id })));
    byId("known-names").replaceChildren(...models.data.filter(({ stands_for: names }) => names).map(({ id }) => el("option", { value: id })));
  }

  /** Shows why the service refuses the filters, at the field that its message names. */
  refuse(message, errors = []) {
    write(byId("refused-filter"), message);
    for (const input of this.form.querySelectorAll("[name]")) {
      put(input, "aria-invalid", errors.some(({ field }) => field === input.name || field.startsWith(`${input.name}[`)));
    }
  }
}

/** Reads "KEY=VALUE" pairs, one a line or separated by commas. */
export function readPairs(text) {
  const parts = text.split(/[\n,]/).map((part) => part.trim()).filter(Boolean);
  return parts.map((part) => {
    const at = part.indexOf("=");
    return at < 0 ? [part, ""] : [part.slice(0, at).trim(), part.slice(at + 1).trim()];
  });
}
