// Elements are made here and nowhere else. Whatever is put into one becomes text: there is no way to give it markup.

const SVG = "http://www.w3.org/2000/svg";

// The handlers that `patch` carries over to an element that stays.
const HANDLERS = [
  "onclick",
  "onchange",
  "oninput",
  "onsubmit",
  "onkeydown",
  "onpointermove",
  "onpointerleave",
  "ontoggle",
  "onclose",
  "onblur",
];

/// An element: `h("a", { href: "#/" }, "text", element, [more], null)`. Attributes that are null, undefined or false are left
/// out; those that begin with "on" are handlers.
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/// The same for SVG.
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    // A handler that returns false would keep the browser from following a link or typing a letter.
    if (name.startsWith("on")) element[name] = (event) => void value(event);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(element, child);
    else if (child instanceof Node) element.append(child);
    else if (child !== null && child !== undefined && child !== false)
      element.append(document.createTextNode(String(child)));
  }
}

/// Makes the children of `parent` like `nodes`. What is the same stays, so that focus, selection, scroll and open details survive.
/// Elements with `data-key` are found again by it.
export function show(parent, ...nodes) {
  patchChildren(
    parent,
    nodes.flat(Infinity).filter((node) => node instanceof Node),
  );
}

function isAlike(one, other) {
  if (one.nodeType !== other.nodeType) return false;
  if (one.nodeType !== Node.ELEMENT_NODE) return true;
  return one.tagName === other.tagName && one.dataset.key === other.dataset.key && one.type === other.type;
}

function patchChildren(parent, wanted) {
  const keyed = new Map();
  for (const child of parent.children) if (child.dataset.key) keyed.set(child.dataset.key, child);
  let at = parent.firstChild;
  for (const node of wanted) {
    if (node === at) {
      at = at.nextSibling;
      continue;
    }
    const known = node.nodeType === Node.ELEMENT_NODE && node.dataset.key ? keyed.get(node.dataset.key) : undefined;
    if (known && known !== at && isAlike(known, node)) {
      parent.insertBefore(known, at);
      patch(known, node);
    } else if (at && isAlike(at, node)) {
      patch(at, node);
      at = at.nextSibling;
    } else {
      parent.insertBefore(node, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function patch(old, wanted) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  // A person opened it; a dialog is the business of whoever shows it.
  const isOpen = old.tagName === "DETAILS" || old.tagName === "DIALOG" ? old.hasAttribute("open") : null;
  for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (isOpen !== null) old.toggleAttribute("open", isOpen);
  for (const name of HANDLERS) if (old[name] !== wanted[name]) old[name] = wanted[name];
  if (old.tagName === "INPUT" && old !== document.activeElement) {
    if (old.type === "checkbox") old.checked = wanted.hasAttribute("checked");
    else old.value = wanted.getAttribute("value") ?? "";
  }
  patchChildren(old, [...wanted.childNodes]);
  if (old.tagName === "SELECT" && old !== document.activeElement) old.value = wanted.value;
}
