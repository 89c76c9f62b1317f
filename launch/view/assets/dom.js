// Builds elements. Every text goes through `shown` and a text node, so no text of a model or a file can become markup.

const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202f\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb]|[\u{e0000}-\u{e0fff}]|\p{Cs}|\p{Co}/gu;
const LONGEST = 20000;

/** Returns a text in which characters that nobody sees, or that turn the direction of writing, are escapes. */
export function shown(text) {
  return String(text).replace(HIDDEN, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

/** Returns an element. Keys of `given` that begin with "on" are listeners, "set" are properties of its style. */
export function h(tag, given = {}, ...children) {
  return filled(document.createElement(tag), given, children);
}

/** Returns an SVG element. */
export function s(tag, given = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), given, children);
}

function filled(element, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "set") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value") element.value = value;
    else if (name === "checked" || name === "selected" || name === "disabled" || name === "open") element[name] = value;
    else element.setAttribute(name, shown(value === true ? "" : value));
  }
  add(element, children);
  return element;
}

/** Adds children: elements, texts, lists of them; what is null is left out. */
export function add(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) add(element, child);
    else element.appendChild(child instanceof Node ? child : document.createTextNode(shown(child)));
  }
  return element;
}

/** Returns a text in a block of its own; of a long one the beginning, and a button for the rest. */
export function longText(text, kind = "") {
  const block = h("pre", { class: `text ${kind}` }, text.length > LONGEST ? text.slice(0, LONGEST) : text);
  if (text.length <= LONGEST) return block;
  const more = h("button", { type: "button" }, `${(text.length - LONGEST).toLocaleString("en")} more characters`);
  more.addEventListener("click", () => {
    add(block, [text.slice(LONGEST)]);
    more.remove();
  });
  return h("div", {}, block, more);
}

/** Returns a number as a person reads it; "—" where there is none, which is not 0. */
export function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "—";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (Math.abs(value) >= 1e5) return Math.round(value).toLocaleString("en");
  const rounded = Number(value.toPrecision(digits));
  return Math.abs(rounded) >= 1000 ? rounded.toLocaleString("en") : String(rounded);
}

export function percent(share) {
  return share === null || share === undefined ? "—" : `${num(100 * share, 3)} %`;
}

/** Returns a time of the wall clock, in seconds since 1970, in the reader's time zone. */
export function clock(seconds) {
  if (seconds === null || seconds === undefined) return "—";
  const date = new Date(seconds * 1000);
  return `${date.toLocaleDateString("sv")} ${date.toLocaleTimeString("sv")}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "—";
  return value < 120 ? `${num(value, 3)} s` : `${num(value / 60, 3)} min`;
}

/** Returns a table. `columns` are pairs of a title and a function from a row to what its cell shows; `given.own` says that the page has a CSV of its own. */
export function table(name, columns, rows, given = {}) {
  const head = h("tr", {}, columns.map(([title, , sort]) => h("th", { scope: "col", "aria-sort": sort }, title)));
  const body = rows.map((row) =>
    h("tr", { class: given.rowClass ? given.rowClass(row) : null },
      columns.map(([title, cell]) => h("td", { "data-title": typeof title === "string" ? title : "" }, cell(row)))));
  const scroll = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name },
    h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
  if (given.own) return scroll;
  const cells = () => [...scroll.querySelectorAll("tr")].map((row) => [...row.children].map((cell) => plain(cell.innerText.trim())));
  return h("div", { class: "saved" }, scroll, saveCsvButton(name.replace(/\W+/g, "-"), cells));
}

/** Returns a number that `num` has written as a number again, any other text as it is. */
function plain(text) {
  const digits = text.replace(/,(?=\d{3}(?!\d))/g, "");
  return /^-?(0|[1-9]\d{0,14})(\.\d+)?$/.test(digits) ? Number(digits) : text;
}

/** Saves a text as a file on the reader's machine. */
export function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Returns rows as CSV. A cell that a spreadsheet would take for a formula gets a quote in front. */
export function csv(rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = shown(typeof value === "string" ? value : JSON.stringify(value));
    return `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replace(/"/g, '""')}"`;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

export function saveCsvButton(name, rows) {
  return h("button", { type: "button", class: "small", onclick: async () => save(`${name}.csv`, "text/csv", csv(await rows())) }, "CSV");
}
