// The form for a new job, with the strategies and parameters of GET /v1/strategies and the models of GET /v1/models.

import { byId, el, put, write } from "./dom.js";
import { Refusal, call } from "./service.js";

const AS_NAMED = { parameters: { properties: {} }, stops_when_sure: false };
const LONG_TEXT = 200; // characters from which a text field has several lines

export class SubmitForm {
  constructor(onSubmitted) {
    this.dialog = byId("form");
    this.form = this.dialog.querySelector("form");
    this.refused = this.dialog.querySelector(".refused");
    this.choice = byId("strategies");
    this.strategies = new Map();
    this.models = new Map();
    byId("models").addEventListener("change", () => this.#chooseModel());
    this.onSubmitted = onSubmitted;
    this.choice.addEventListener("change", () => this.#choose());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    byId("problem").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
  }

  async open() {
    if (!this.strategies.size) {
      const { data, default: fallback } = await call("GET", "/v1/strategies");
      this.strategies = new Map(data.map((strategy) => [strategy.name, strategy]));
      this.fallback = fallback;
    }
    await this.#listModels();
    this.#refuse("", []);
    this.dialog.showModal();
    byId("problem").focus();
  }

  /** Lists the models that write solutions; without an answer of an engine, the service's own remains. */
  async #listModels() {
    const listed = await call("GET", "/v1/models").catch(() => ({ data: [], default: "" }));
    this.models = new Map(listed.data.filter(({ defaults }) => defaults).map((model) => [model.id, model]));
    const chosen = byId("models").value;
    byId("models").replaceChildren(...[...this.models.keys()].map((name) => el("option", { value: name }, name)));
    byId("models").value = this.models.has(chosen) ? chosen : listed.default;
    byId("models").parentElement.hidden = this.models.size < 2;
    this.#chooseModel();
  }

  #chooseModel() {
    const model = this.models.get(byId("models").value);
    this.#showDefaults(model?.defaults);
    write(byId("verifier"), model ? verifierOf(model) : "");
    this.#listStrategies(model);
  }

  /** Lists the strategies that the chosen model can run: the form has no field for a verifier. */
  #listStrategies(model) {
    const hasVerifier = model?.defaults.verifier;
    const can = ({ available, needs_verifier }) => (model ? hasVerifier || !needs_verifier : available);
    const writing = [...this.strategies.values()].filter(({ takes_candidates }) => !takes_candidates);
    const names = writing.filter(can).map(({ name }) => name);
    const chosen = this.choice.value;
    const own = model?.stands_for && model.defaults.strategy.name; // the search that the name stands for
    const options = names.map((name) => el("option", { value: name }, name.replaceAll("_", " ")));
    if (own) options.unshift(el("option", { value: "" }, `as the name says: ${own.replaceAll("_", " ")}`));
    this.choice.replaceChildren(...options);
    const fallback = model?.defaults.strategy.name ?? this.fallback;
    this.choice.value = own ? "" : [chosen, "beam", fallback].find((name) => names.includes(name));
    if (this.choice.value !== chosen) this.#choose();
  }

  /** Shows what the chosen model uses for fields that stay empty. */
  #showDefaults(defaults) {
    const { system, prompt, sampling } = defaults ?? { sampling: {} };
    const shown = { system, prompt, temperature: sampling.temperature, max_tokens: sampling.max_tokens };
    for (const [name, value] of Object.entries(shown)) {
      byId("more").querySelector(`[name=${name}]`).placeholder = value ?? "none";
    }
  }

  #choose() {
    const strategy = this.strategies.get(this.choice.value) ?? { ...AS_NAMED, summary: this.#describeName() };
    write(byId("about"), strategy.summary);
    byId("sure").hidden = !strategy.stops_when_sure;
    const fields = Object.entries(strategy.parameters.properties).map(([name, schema]) => field(name, schema));
    byId("parameters").replaceChildren(...fields);
  }

  #describeName() {
    return this.models.get(byId("models").value)?.description ?? "";
  }

  /** Returns the job in the form; empty fields are left to the service, and to the name that is chosen as a model. */
  spec() {
    const spec = { problem: byId("problem").value };
    if (this.choice.value) spec.strategy = { name: this.choice.value };
    const { properties } = (this.strategies.get(this.choice.value) ?? AS_NAMED).parameters;
    for (const input of byId("parameters").querySelectorAll("[name]")) {
      const value = valueOf(input);
      if (value !== null && value !== properties[input.name].default) spec.strategy[input.name] = value;
    }
    const budget = filled(byId("budget"));
    if (Object.keys(budget).length) spec.budget = budget;
    const { temperature, max_tokens, confidence, deterministic, ...more } = filled(byId("more"));
    if (temperature !== undefined) spec.sampling = { temperature };
    if (max_tokens !== undefined) spec.sampling = { ...spec.sampling, max_tokens };
    if (this.models.size > 1) spec.model = byId("models").value;
    if (confidence !== undefined && !byId("sure").hidden) spec.confidence = confidence;
    if (deterministic) spec.deterministic = true;
    return { ...spec, ...more };
  }

  async #submit() {
    const button = this.form.querySelector("[type=submit]");
    button.disabled = true;
    try {
      const job = await call("POST", "/v1/jobs", this.spec());
      this.dialog.close();
      this.onSubmitted(job);
    } catch (error) {
      this.#refuse(error instanceof Refusal ? error.message : `no answer: ${error.message}`, error.errors ?? []);
    } finally {
      button.disabled = false;
    }
  }

  /** Shows what was wrong, and in which fields. */
  #refuse(message, errors) {
    write(this.refused, message);
    for (const part of this.form.querySelectorAll("[data-field]")) {
      const wrong = errors.some(({ field: name }) => name === part.dataset.field || `strategy.${name}` === part.dataset.field);
      put(part.querySelector("input, select, textarea"), "aria-invalid", wrong);
    }
  }
}

/** Returns a line about the verifier of a model's jobs. */
function verifierOf({ defaults: { verifier }, probe }) {
  if (verifier) return `Verifier: ${verifier.model ?? verifier.kind}`;
  return probe ? "Verifier: none named; the model has a probe, which its settings may name" : "Verifier: none";
}

function field(name, schema) {
  const plain = schema.anyOf?.find((option) => option.type !== "null") ?? schema;
  const value = schema.default ?? "";
  const isObject = plain.type === "object" || plain.$ref !== undefined;
  const common = { name, "data-type": isObject ? "object" : plain.type, title: schema.description };
  let input;
  if (plain.enum) {
    input = el("select", common, plain.enum.map((option) => el("option", { selected: option === value }, option)));
  } else if (plain.type === "boolean") {
    input = el("input", { ...common, type: "checkbox", checked: value === true });
  } else if (plain.type === "integer" || plain.type === "number") {
    const least = plain.minimum ?? plain.exclusiveMinimum;
    const step = plain.type === "integer" ? 1 : "any";
    input = el("input", { ...common, type: "number", min: least, max: plain.maximum, step, value, placeholder: "automatic" });
  } else if ((plain.maxLength ?? 0) > LONG_TEXT) {
    input = el("textarea", { ...common, rows: value.split("\n").length + 1 }, value);
  } else {
    input = el("input", { ...common, type: "text", value, placeholder: isObject ? "none; or JSON" : "automatic" });
  }
  const wide = input.tagName === "TEXTAREA" ? "wide" : null;
  return el("label", { "data-field": `strategy.${name}`, class: wide }, name.replaceAll("_", " "), input, el("small", {}, schema.description));
}

function valueOf(input) {
  if (input.type === "checkbox") return input.checked;
  if (input.value === "") return null;
  if (input.dataset.type === "object") return readJson(input.value);
  return input.type === "number" ? Number(input.value) : input.value;
}

/** Returns the value of a text that is JSON; another text as it is, so that the service says what is wrong. */
function readJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function filled(box) {
  const values = [...box.querySelectorAll("[name]")].map((input) => [input.name, valueOf(input)]);
  return Object.fromEntries(values.filter(([, value]) => value !== null && value !== false));
}
