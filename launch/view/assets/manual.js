// What do the docs say?  A page of the documentation that the package ships, which alarms and advice name.

import { h } from "./dom.js";
import { ask, address } from "./data.js";

export async function render(main, given) {
  const page = await ask("docs", { page: given.page });
  const lines = page.text.split("\n");
  const place = lines.findIndex((line) => line.startsWith("# "));
  main.append(h("p", { class: "soft" }, h("a", { href: address("overview", { run: given.run }) }, "← Learning"), ` docs/${page.page}`),
    h("h1", {}, place < 0 ? page.page : lines[place].slice(2)), blocks(lines.slice(place + 1), given, page));
}

/** Returns the blocks of a text: headings, code, tables, and paragraphs. Comments and pictures are left out. */
function blocks(lines, given, page) {
  const made = [];
  let text = [];
  const flush = () => {
    if (text.length) made.push(text[0].startsWith("|") ? rows(text, given, page) : h("p", {}, words(text.join(" "), given, page)));
    text = [];
  };
  for (let i = 0; i < lines.length; i += 1) {
    const line = lines[i];
    const heading = /^(#{2,4}) (.*)/.exec(line);
    if (line.startsWith("```")) {
      flush();
      const end = lines.findIndex((one, k) => k > i && one.startsWith("```"));
      const last = end < 0 ? lines.length : end;
      made.push(h("pre", { class: "text" }, lines.slice(i + 1, last).join("\n")));
      i = last;
    } else if (heading) {
      flush();
      made.push(h(heading[1].length === 2 ? "h2" : "h3", {}, words(heading[2], given, page)));
    } else if (!line.trim() || /^(<!--|!\[)/.test(line)) {
      flush();
    } else {
      if (/^\s*([-*]|\d+\.) /.test(line)) flush();
      text.push(line.replace(/^\s*[-*] /, "• "));
    }
  }
  flush();
  return made;
}

function rows(lines, given, page) {
  const cells = (line) => line.replace(/^\||\|\s*$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const body = lines.filter((line) => !/^\|[\s:|-]+$/.test(line)).map(cells);
  const row = (tag) => (line) => h("tr", {}, line.map((cell) => h(tag, {}, words(cell, given, page))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "table" }, h("table", {}, h("thead", {}, row("th")(body[0])),
    h("tbody", {}, body.slice(1).map(row("td")))));
}

const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\[([^\]]+)\]\(([^)]+)\)/g;

/** Returns a line with its code, bold words and links to other pages; links to elsewhere stay text. */
function words(text, given, page) {
  const made = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    made.push(text.slice(at, found.index));
    const [whole, code, bold, title, target] = found;
    if (code) made.push(h("code", {}, code));
    else if (bold) made.push(h("b", {}, words(bold, given, page)));
    else made.push(linked(title.replaceAll("`", ""), target, given, page));
    at = found.index + whole.length;
  }
  return [...made, text.slice(at)];
}

function linked(title, target, given, page) {
  const path = target.split("#")[0];
  if (!path.endsWith(".md") || path.includes(":")) return title;
  const parts = page.page.split("/").slice(0, -1);
  for (const part of path.split("/")) {
    if (part === "..") parts.pop();
    else if (part !== ".") parts.push(part);
  }
  return h("a", { href: address("docs", { run: given.run, page: parts.join("/") }) }, title);
}
