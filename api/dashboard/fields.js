// Form fields from JSON schemas, and their values.

import { el } from "./dom.js";

const LONG_TEXT = 200; // characters from which a text field has several lines

/** Returns the fields of an object's schema, but for `left`. `path` is the object's place in the job. */
export function makeFields(schema, path, left = []) {
  return Object.entries(schema.properties).filter(([name]) => !left.includes(name)).map(([name, part]) => makeField(name, part, path));
}

function makeField(name, schema, path) {
  const plain = (schema.anyOf ?? schema.oneOf)?.find((option) => option.type !== "null") ?? schema;
  const isObject = plain.type === "object" || plain.type === "array" || plain.$ref !== undefined;
  const value = isObject ? (schema.default ? JSON.stringify(schema.default) : "") : (schema.default ?? "");
  const common = { name, "data-type": isObject ? "object" : plain.type, title: schema.description };
  let input;
  if (plain.enum) {
    const open = schema.default === null || schema.default === undefined ? [el("option", { value: "" }, "automatic")] : [];
    input = el("select", common, open, plain.enum.map((option) => el("option", { selected: option === value }, option)));
  } else if (plain.type === "boolean") {
    input = el("input", { ...common, type: "checkbox", checked: value === true });
  } else if (plain.type === "integer" || plain.type === "number") {
    const least = plain.minimum ?? plain.exclusiveMinimum;
    const step = plain.type === "integer" ? 1 : "any";
    input = el("input", { ...common, type: "number", min: least, max: plain.maximum, step, value, placeholder: "automatic" });
  } else if (plain.type === "string" && (plain.maxLength ?? 0) > LONG_TEXT) {
    input = el("textarea", { ...common, rows: Math.min(6, value.split("\n").length + 1) }, value);
  } else {
    input = el("input", { ...common, type: "text", value, placeholder: isObject ? "none; or JSON" : "automatic" });
  }
  const wide = input.tagName === "TEXTAREA" ? "wide" : null;
  return el("label", { "data-field": `${path}.${name}`, class: wide }, name.replaceAll("_", " "), input, el("small", {}, schema.description));
}

export function valueOf(input) {
  if (input.type === "checkbox") return input.checked;
  if (input.value === "") return null;
  if (input.dataset.type === "object") return readJson(input.value);
  return input.type === "number" ? Number(input.value) : input.value;
}

/** Returns the value of a text that is JSON; another text as it is, so that the service says what is wrong. */
export function readJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** Returns the values of the fields in a box that are not their schema's defaults. */
export function changedValues(box, schema) {
  const values = [...box.querySelectorAll("[name]")].map((input) => [input.name, valueOf(input)]);
  const isChanged = ([name, value]) => value !== null && JSON.stringify(value) !== JSON.stringify(schema.properties[name]?.default);
  return Object.fromEntries(values.filter(isChanged));
}

/** Returns the values of the fields in a box that are filled in. */
export function filledValues(box) {
  const values = [...box.querySelectorAll("[name]")].map((input) => [input.name, valueOf(input)]);
  return Object.fromEntries(values.filter(([, value]) => value !== null && value !== false));
}
