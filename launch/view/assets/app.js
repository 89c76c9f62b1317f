// The frame around the pages: which run, which page, keys, theme, and what is new.

import { add, h } from "./dom.js";
import { ask, address, exported, newsCount, view } from "./data.js";
import { redraw } from "./charts.js";
import * as overview from "./overview.js";
import * as timeline from "./timeline.js";
import * as ledger from "./ledger.js";
import * as trajectories from "./trajectories.js";
import * as inspector from "./inspector.js";
import * as staleness from "./staleness.js";
import * as differences from "./differences.js";
import * as manual from "./manual.js";

const PAGES = {
  overview: ["Learning", overview.render],
  timeline: ["Waiting", timeline.render],
  ledger: ["Tokens", ledger.render],
  table: ["Writing", trajectories.render],
  staleness: ["Staleness", staleness.render],
  differences: ["Differences", differences.render],
};
const BEHIND = { samples: overview.renderSamples, trajectory: inspector.render, docs: manual.render };
// Looking must take next to nothing from a run: a page rests REST times as long as it took to bring it up to date, and longer
// while nothing changes. On a busy machine it takes longer, so it asks less often there.
const [LEAST_MS, MOST_MS, REST] = [5000, 30000, 50];
const KEYS = [
  ["j / k", "next and previous trajectory, or step"], ["[ / ]", "previous and next member of the group"], ["/", "to the filter"],
  ["1 … 6", "the pages"], ["t", "text, tokens, shaded"], ["?", "this help"], ["Esc", "closes this"],
];

const main = document.getElementById("main");
const select = document.getElementById("run");
let asked = 0;
let finished = 0;
let runs = [];
let update = null;

/** Shows the view that the address names. */
async function show(keepPlace = false, anyway = false) {
  const mine = ++asked;
  const hash = location.hash;
  const { page, given } = view();
  const found = PAGES[page]?.[1] || BEHIND[page];
  given.run = runs.some((run) => run.run === given.run) ? given.run : runs[0]?.run;
  navigation(page, given);
  const fresh = h("div");
  const known = newsCount();
  let updates = null;
  // Pages give lists, and null for what is not there.
  fresh.append = (...children) => add(fresh, children);
  try {
    if (!found) throw new Error(`there is no page ${page}`);
    updates = await found(fresh, given, (changed) => { location.hash = address(page, { ...given, ...changed }); });
  } catch (error) {
    fresh.append(h("p", { class: "error", role: "alert" }, error.message));
  }
  // A later view may have been asked for meanwhile.
  if (mine !== asked) return;
  finished = mine;
  update = updates || null;
  if (keepPlace && !anyway && newsCount() === known) return;
  const place = keepPlace ? window.scrollY : 0;
  const focused = keepPlace ? document.activeElement?.id : "";
  main.replaceChildren(...fresh.childNodes);
  window.scrollTo(0, place);
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  document.title = `${main.querySelector("h1")?.textContent || page} · ${given.run}`;
  main.dataset.view = hash;
  main.dataset.ready = String(mine);
  requestAnimationFrame(redraw);
}

function navigation(page, given) {
  const nav = document.getElementById("nav");
  const behind = page === "samples" || page === "docs" ? "overview" : page === "trajectory" ? "table" : page;
  nav.replaceChildren(...Object.entries(PAGES).map(([name, [title]], i) =>
    h("a", { href: address(name, { run: given.run }), "aria-current": name === behind ? "page" : null, title: `key ${i + 1}` }, title)));
  select.replaceChildren(...runs.map((run) => h("option", { value: run.run, selected: run.run === given.run }, `${run.run} (${run.state})`)));
}

function progress() {
  const box = document.getElementById("progress");
  const texts = runs.flatMap(({ run, progress: p }) => {
    if (!p) return [];
    const found = [];
    if (!p.whole && p.total_bytes) found.push(`reading the journal of ${run}: ${Math.round(100 * p.done_bytes / p.total_bytes)} %`);
    if (p.deleted_below) {
      const until = p.deleted_until_step === null ? "" : ` at step ${p.deleted_until_step}`;
      found.push(`${run}: older files of the journal were deleted${until}; keep more with broker.journal.keep_bytes`);
    }
    if (p.damage.length) found.push(`${run}: the journal is damaged at ${p.damage.length} places; see offbeat journal verify`);
    if (p.missing) found.push(`${run}: no journal is there; pages of tokens and trajectories have nothing to show`);
    if (p.left_out) found.push(`${run}: ${p.left_out} further trajectories are left out`);
    return found;
  });
  box.hidden = !texts.length;
  box.replaceChildren(document.createTextNode(texts.join(" · ")));
}

async function freshen() {
  try {
    runs = (await ask("runs")).runs;
    progress();
  } catch (error) {
    if (!runs.length) main.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
    // What stands on the page is old from now on.
    const box = document.getElementById("progress");
    box.hidden = false;
    box.replaceChildren(document.createTextNode(`${new Date().toLocaleTimeString("sv")}: ${error.message}`));
    return false;
  }
  return true;
}

function theme(name) {
  document.documentElement.classList.toggle("dark", name === "dark");
  document.documentElement.style.colorScheme = name;
  redraw();
}

function startTheme() {
  let name = "";
  try { name = localStorage.getItem("offbeat-theme") || ""; } catch { /* file:// may have no storage */ }
  if (!name) name = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  theme(name);
  document.getElementById("theme").addEventListener("click", () => {
    const next = document.documentElement.classList.contains("dark") ? "light" : "dark";
    try { localStorage.setItem("offbeat-theme", next); } catch { /* it stays for this page */ }
    theme(next);
    show(true, true);
  });
}

function help() {
  const dialog = document.getElementById("keys");
  dialog.replaceChildren(h("h2", {}, "Keys"), h("table", {}, h("tbody", {}, KEYS.map(([key, text]) =>
    h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, text))))),
    h("p", {}, "Figures save as SVG, numbers as CSV. The address reproduces what you see."),
    h("button", { type: "button", onclick: () => dialog.close() }, "close"));
  dialog.showModal();
}

function pressed(event) {
  const inField = event.target.closest("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || inField) return;
  const click = (id) => { const found = document.getElementById(id); if (found && !found.disabled) found.click(); };
  const actions = { j: () => click("next"), k: () => click("previous"), "[": () => click("sibling-previous"), "]": () => click("sibling-next"),
    t: () => click("next-tab"), "?": help, "/": () => document.getElementById("filter")?.focus() };
  const pages = Object.keys(PAGES);
  if (/^[1-6]$/.test(event.key)) location.hash = address(pages[Number(event.key) - 1], { run: view().given.run });
  else if (actions[event.key]) actions[event.key]();
  else return;
  event.preventDefault();
}

async function start() {
  startTheme();
  document.getElementById("help").addEventListener("click", help);
  document.addEventListener("keydown", pressed);
  select.addEventListener("change", () => { location.hash = address(view().page, { run: select.value }); });
  window.addEventListener("hashchange", () => show());
  if (!(await freshen())) return;
  await show();
  if (!exported()) follow();
}

/** Brings the page up to date again and again, but not while nobody sees it. */
async function follow() {
  let rest = LEAST_MS;
  for (;;) {
    await new Promise((done) => { setTimeout(done, rest); });
    if (document.hidden) await new Promise((done) => { document.addEventListener("visibilitychange", done, { once: true }); });
    const began = performance.now();
    const before = JSON.stringify(runs);
    const changed = await freshen() && JSON.stringify(runs) !== before;
    if (changed) await renew();
    rest = changed ? Math.max(LEAST_MS, REST * (performance.now() - began)) : 1.5 * rest;
    rest = Math.min(MOST_MS, rest);
  }
}

async function renew() {
  // A view that is on its way would be given up for one that finds nothing new, and draws nothing.
  if (asked !== finished) return;
  const { page } = view();
  const busy = document.activeElement?.matches("input, select") || document.querySelector("dialog[open]");
  if (!PAGES[page] || page === "table" || page === "differences" || busy) return;
  if (!update) {
    await show(true);
    return;
  }
  try {
    await update();
  } catch { /* the next round says what is wrong, or it is over */ }
}

start();
