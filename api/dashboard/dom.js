// Elements. Text from models, clients and the service is inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Returns an HTML element. Attributes that are functions become listeners, `style` is an object, strings become text. */
export function el(tag, attributes = {}, ...children) {
  return applyAttributes(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return applyAttributes(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

/** Sets an attribute if it changes, since each write costs a layout. */
export function put(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Replaces the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
}

/** Returns the children without missing ones. */
const present = (children) => children.flat(2).filter((child) => child !== null && child !== undefined && child !== false);

function applyAttributes(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "style") for (const [key, part] of Object.entries(value)) element.style.setProperty(key, part);
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, value);
  }
  element.append(...present(children));
  return element;
}
