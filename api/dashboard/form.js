// The form for a new job: strategies, verifiers, models and names of the service, and the schemas of its OpenAPI document.

import { byId, el, put, write } from "./dom.js";
import { changedValues, filledValues, makeFields, readJson } from "./fields.js";
import { readPairs } from "./filters.js";
import { Refusal, call } from "./service.js";

const AS_NAMED = { parameters: { properties: {} }, stops_when_sure: false };
const NO_VERIFIER = "none";
const CONSTRAINT_TEXTS = {
  json_schema: '{"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}',
  regex: "[0-9]{1,4}",
  grammar: 'start: "yes" | "no"',
  choice: "yes\nno\nunknown",
};

export class SubmitForm {
  constructor(onSubmitted) {
    this.dialog = byId("form");
    this.form = this.dialog.querySelector("form");
    this.refused = this.dialog.querySelector("form > .refused");
    this.choice = byId("strategies");
    this.verifier = byId("verifiers");
    this.strategies = new Map();
    this.verifiers = new Map();
    this.models = new Map();
    this.onSubmitted = onSubmitted;
    byId("models").addEventListener("change", () => this.#chooseModel());
    this.verifier.addEventListener("change", () => this.#chooseVerifier());
    this.choice.addEventListener("change", () => this.#choose());
    byId("constraint").addEventListener("change", () => this.#chooseConstraint());
    byId("python").addEventListener("change", () => (byId("python-fields").hidden = !byId("python").checked));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    byId("problem").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
  }

  async open() {
    if (!this.strategies.size) await this.#readCatalogue();
    await this.#listModels();
    this.#refuse("", []);
    this.dialog.showModal();
    byId("problem").focus();
  }

  async #readCatalogue() {
    const [strategies, verifiers, document] = await Promise.all(["/v1/strategies", "/v1/verifiers", "/openapi.json"].map((path) => call("GET", path)));
    this.strategies = new Map(strategies.data.map((strategy) => [strategy.name, strategy]));
    this.fallback = strategies.default;
    this.verifiers = new Map(verifiers.data.map((verifier) => [verifier.kind, verifier]));
    this.verifier.append(el("optgroup", { label: "Instead" }, el("option", { value: NO_VERIFIER }, "none"), verifiers.data.map(({ kind }) => el("option", { value: kind }, kind.replaceAll("_", " ")))));
    this.schemas = document.components.schemas;
    byId("answer-fields").replaceChildren(...makeFields(this.schemas.AnswerSpec, "answer"));
    byId("python-fields").replaceChildren(...makeFields(this.schemas.PythonTool, "tools", ["type"]));
    const kinds = Object.keys(this.schemas.ConstraintSpec.properties);
    byId("constraint").append(...kinds.map((kind) => el("option", { value: kind }, kind.replaceAll("_", " "))));
  }

  /** Lists the models that write solutions, and the names; without an answer of an engine, the service's own remains. */
  async #listModels() {
    const listed = await call("GET", "/v1/models").catch(() => ({ data: [], default: "" }));
    const writing = listed.data.filter(({ defaults }) => defaults);
    this.models = new Map(writing.map((model) => [model.id, model]));
    const chosen = byId("models").value;
    const group = (label, models) => (models.length ? [el("optgroup", { label }, models.map(({ id }) => el("option", { value: id }, id)))] : []);
    byId("models").replaceChildren(...group("Models", writing.filter((model) => !model.stands_for)), ...group("Names of searches", writing.filter((model) => model.stands_for)));
    byId("models").value = this.models.has(chosen) ? chosen : listed.default;
    byId("models").parentElement.hidden = this.models.size < 2;
    this.#chooseModel();
  }

  #chooseModel() {
    const model = this.models.get(byId("models").value);
    this.#showDefaults(model?.defaults);
    write(byId("verifier"), model ? describeVerifier(model) : "");
    this.#listStrategies(model);
  }

  #chooseVerifier() {
    const kind = this.verifiers.get(this.verifier.value);
    byId("verifier-fields").replaceChildren(...(kind ? makeFields(kind.parameters, "verifier", ["kind"]) : []));
    write(byId("verifier-about"), kind?.summary ?? "");
    this.#listStrategies(this.models.get(byId("models").value));
  }

  /** Lists the strategies that the chosen model can run with the chosen verifier. */
  #listStrategies(model) {
    const own = this.verifier.value === "" ? (model ? Boolean(model.defaults.verifier) : null) : this.verifier.value !== NO_VERIFIER;
    const can = ({ available, needs_verifier }) => (own === null ? available : own || !needs_verifier);
    const writing = [...this.strategies.values()].filter(({ takes_candidates }) => !takes_candidates);
    const names = writing.filter(can).map(({ name }) => name);
    const chosen = this.choice.value;
    const named = model?.stands_for && model.defaults.strategy.name; // the search that the name stands for
    const options = names.map((name) => el("option", { value: name }, name.replaceAll("_", " ")));
    if (named) options.unshift(el("option", { value: "" }, `as the name says: ${named.replaceAll("_", " ")}`));
    this.choice.replaceChildren(...options);
    const fallback = model?.defaults.strategy.name ?? this.fallback;
    this.choice.value = named ? "" : [chosen, "beam", fallback, "self_consistency"].find((name) => names.includes(name));
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
    byId("parameters").replaceChildren(...makeFields(strategy.parameters, "strategy"));
  }

  #chooseConstraint() {
    const kind = byId("constraint").value;
    const text = byId("constraint-text");
    byId("constraint-field").hidden = !(kind in CONSTRAINT_TEXTS);
    text.placeholder = CONSTRAINT_TEXTS[kind] ?? "";
    write(byId("constraint-about"), this.schemas.ConstraintSpec.properties[kind]?.description ?? "");
  }

  #describeName() {
    return this.models.get(byId("models").value)?.description ?? "";
  }

  /** Returns the job in the form; empty fields are left to the service, and to the name that is chosen as a model. */
  spec() {
    const spec = { problem: byId("problem").value };
    if (this.models.size > 1) spec.model = byId("models").value;
    const { parameters } = this.strategies.get(this.choice.value) ?? AS_NAMED;
    if (this.choice.value) spec.strategy = { name: this.choice.value, ...changedValues(byId("parameters"), parameters) };
    const budget = filledValues(byId("budget"));
    if (Object.keys(budget).length) spec.budget = budget;
    const { temperature, max_tokens, confidence, metadata, ...more } = filledValues(byId("more"));
    if (temperature !== undefined) spec.sampling = { temperature };
    if (max_tokens !== undefined) spec.sampling = { ...spec.sampling, max_tokens };
    if (confidence !== undefined && !byId("sure").hidden) spec.confidence = confidence;
    if (metadata !== undefined) spec.metadata = Object.fromEntries(readPairs(metadata));
    return { ...spec, ...this.#verifierSpec(), ...this.#answerSpec(), ...this.#constraintSpec(), ...this.#toolSpecs(), ...more };
  }

  #verifierSpec() {
    const kind = this.verifier.value;
    if (!kind) return {};
    if (kind === NO_VERIFIER) return { verifier: null };
    return { verifier: { kind, ...changedValues(byId("verifier-fields"), this.verifiers.get(kind).parameters) } };
  }

  #answerSpec() {
    const answer = changedValues(byId("answer-fields"), this.schemas.AnswerSpec);
    const pattern = byId("pattern").value;
    if (pattern) answer.extract = { regex: pattern };
    return Object.keys(answer).length ? { answer } : {};
  }

  #constraintSpec() {
    const kind = byId("constraint").value;
    const text = byId("constraint-text").value;
    if (!kind) return {};
    const values = { json_object: () => true, json_schema: () => readJson(text), choice: () => text.split("\n").filter(Boolean) };
    return { constraint: { [kind]: (values[kind] ?? (() => text))() } };
  }

  #toolSpecs() {
    const tools = byId("python").checked ? [{ type: "python", ...changedValues(byId("python-fields"), this.schemas.PythonTool) }] : [];
    const functions = byId("functions").value.trim();
    if (!functions) return tools.length ? { tools } : {};
    const given = readJson(functions);
    if (typeof given === "string") return { tools: given }; // the service says what is wrong
    return { tools: [...tools, ...[given].flat().map((each) => ({ type: "function", ...each }))] };
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

  /** Shows what was wrong, and in which fields; folded ones unfold. */
  #refuse(message, errors) {
    write(this.refused, message);
    for (const part of this.form.querySelectorAll("[data-field]")) {
      const { field } = part.dataset;
      const wrong = errors.some(({ field: name }) => [name, `strategy.${name}`].some((each) => isAbout(each, field)));
      put(part.querySelector("input, select, textarea"), "aria-invalid", wrong);
      if (wrong) for (let box = part.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    }
    this.form.querySelector("[aria-invalid=true]")?.scrollIntoView({ block: "nearest" });
  }
}

/** Returns true if an error of the service, such as "verifier.generative.votes", is about a field of the form, "verifier.votes". */
function isAbout(error, field) {
  if (error === field) return true;
  const [part, ...rest] = field.split(".");
  if (!error.startsWith(`${part}.`)) return false;
  return rest.length ? error.endsWith(`.${rest.join(".")}`) : true;
}

/** Returns a line about the verifier of a model's jobs. */
function describeVerifier({ defaults: { verifier }, probe }) {
  if (verifier) return `Verifier: ${verifier.model ?? verifier.kind}`;
  return probe ? "Verifier: none named; the model has a probe, which its settings may name" : "Verifier: none";
}
