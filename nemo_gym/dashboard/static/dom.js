// Makes and changes elements. Whatever comes from outside is set as text, never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Returns a new HTML element; children that are no elements become text. */
export function h(name, attributes = {}, ...children) {
  return build(document.createElement(name), attributes, children);
}

/** Returns a new SVG element. */
export function s(name, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, name), attributes, children);
}

/** Sets an element's text where it differs, so that a selection in it outlives what does not change. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Sets or removes an attribute where it differs. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/**
 * Keeps one child of `parent` for each item, in order: elements stay the same ones while their key does, so focus,
 * open details and scroll positions do too.
 */
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.views = new Map();
  }

  update(items, keyOf) {
    const keys = new Set(items.map(keyOf));
    for (const [key, view] of this.views) {
      if (!keys.has(key)) {
        view.element.remove();
        this.views.delete(key);
      }
    }
    items.forEach((item, place) => {
      const key = keyOf(item);
      if (!this.views.has(key)) this.views.set(key, this.make(item));
      const view = this.views.get(key);
      if (this.parent.children[place] !== view.element) {
        this.parent.insertBefore(view.element, this.parent.children[place] ?? null);
      }
      view.update(item);
    });
  }
}

let lastId = 0;

/** Returns an id that no other element has. */
export function newId(stem) {
  lastId += 1;
  return `${stem}-${lastId}`;
}
