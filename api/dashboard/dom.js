// Elements. Whatever a model, a client or the service wrote becomes text here, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes that are functions are listeners, `style` is an object; other children are text. */
export function el(tag, attributes = {}, ...children) {
  return dress(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

/** Sets an attribute only where it changes: writing one costs a layout. */
export function put(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Replaces what is in an element. */
export function fill(element, ...children) {
  element.replaceChildren(...there(children));
}

/** Children without those that are not there. */
const there = (children) => children.flat(2).filter((child) => child !== null && child !== undefined && child !== false);

function dress(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "style") for (const [key, part] of Object.entries(value)) element.style.setProperty(key, part);
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, value);
  }
  element.append(...there(children));
  return element;
}
