// What does it write?  A table of all trajectories in the journal.

import { h, num, table, saveCsvButton, clock } from "./dom.js";
import { ask, address } from "./data.js";
import { bars } from "./charts.js";

const FIELDS = ["reward_min", "reward_max", "reward_name", "env", "purpose", "evaluation", "task", "group", "outcome", "status", "reason",
  "lag_min", "step_min", "step_max", "version", "length_min", "length_max", "correct", "uniform", "trajectory"];
const MEMORY = { query: "", ids: [], start: 0 };

/** The filter in an address: what `ask("table")` needs. */
export const filterOf = (given) => Object.fromEntries(["run", "sort", "start", ...FIELDS].map((n) => [n, given[n]]).filter(([, v]) => v));

/** What became of a trajectory: the broker drops answers to held-out tasks once they are counted. */
export const became = (row) => (row.evaluation && row.outcome === "dropped" ? "evaluated" : row.outcome);

/** Returns the trajectories of the list that a filter gives, for "next" and "previous". */
export async function listOf(query) {
  if (MEMORY.query !== query) {
    const page = await ask("table", Object.fromEntries(new URLSearchParams(query)));
    Object.assign(MEMORY, { query, ids: page.rows.map((row) => row.trajectory), start: page.start });
  }
  return MEMORY.ids;
}

export async function render(main, given, go) {
  const page = await ask("table", filterOf(given));
  const query = new URLSearchParams(filterOf(given)).toString();
  Object.assign(MEMORY, { query, ids: page.rows.map((row) => row.trajectory), start: page.start });
  const histogram = page.histogram;
  main.append(h("h1", {}, "What does it write?"),
    filters(page, given, go),
    h("p", { id: "count" }, `${num(page.selected)} of ${num(page.total)} trajectories in the journal; ${num(page.equal_groups)} of ${num(page.groups)} groups have equal returns and teach nothing. `,
      FIELDS.some((name) => given[name]) ? h("button", { type: "button", class: "small", onclick: () => { location.hash = address("table", { run: given.run }); } }, "no filter") : null),
    h("div", { class: "pair" }, histogram.edges.length ? bars("Rewards; a click filters", histogram.edges.slice(0, -1).map((e) => num(e, 3)), [{ counts: histogram.counts }], {
      names: histogram.edges.slice(0, -1).map((e, i) => `${num(e)} to below ${num(histogram.edges[i + 1])}`),
      link: (i) => address("table", { ...filterOf(given), start: "", reward_min: num(histogram.edges[i], 12), reward_max: below(histogram.edges[i + 1]) }),
      under: histogram.missing ? h("p", { class: "soft" }, `${num(histogram.missing)} have no reward`) : null }) : h("p", { class: "soft" }, "— none of them has a reward")),
    failures(page, given), worst(page, given), rows(page, given, go, query), pages(page, given, go));
}

function failures(page, given) {
  if (!page.failures?.length) return null;
  return h("section", {}, h("h2", {}, "Why episodes failed"), table("failures", [["episodes", (f) => num(f.count)], ["environment", (f) => f.env],
    ["reason", (f) => f.reason || "—"], ["one of them", (f) => h("a", { href: address("trajectory", { run: given.run, id: f.trajectory }) }, f.trajectory)],
    ["", (f) => h("a", { href: address("table", { run: given.run, status: "failed", env: f.env, reason: f.reason.slice(0, 200) }) }, "all of them")]], page.failures));
}

function worst(page, given) {
  if (!page.worst.length) return null;
  return h("details", { id: "worst" }, h("summary", {}, "Held-out tasks that fail, the worst first"), table("held-out tasks", [
    ["task", (t) => `${t.set} ${t.task}`.trim()], ["solved", (t) => `${num(t.solved)} of ${num(t.answers)} answers`], ["failed", (t) => num(t.failed)], ["mean reward", (t) => num(t.reward)],
    ["newest answer", (t) => h("a", { href: address("trajectory", { run: given.run, id: t.trajectory }) }, t.trajectory)],
    ["", (t) => h("a", { href: address("table", { run: given.run, purpose: "eval", task: t.task, sort: "step" }) }, "all answers")]], page.worst));
}

const below = (edge) => String(edge - 1e-9 * Math.max(1, Math.abs(edge)));

function filters(page, given, go) {
  const set = (name) => (event) => go({ [name]: event.target.value, start: "" });
  const pick = (name, label, values) => h("label", {}, label, h("select", { id: `f-${name}`, onchange: set(name) }, h("option", { value: "" }, "all"),
    values.map((v) => (Array.isArray(v) ? v : [v, v])).map(([v, text]) => h("option", { value: v, selected: v === given[name] }, text))));
  const field = (name, label, type = "number", size = 8) => h("label", {}, label,
    h("input", { id: name === "trajectory" ? "filter" : `f-${name}`, type, step: "any", size, value: given[name] || "", onchange: set(name) }));
  const c = page.choices;
  return h("div", { class: "bar", role: "search" },
    field("trajectory", "id (/)", "search", 12), pick("purpose", "set", c.purpose), pick("evaluation", "evaluation", c.evaluation),
    field("task", "task", "search", 6), c.env.length > 1 ? pick("env", "environment", c.env) : null,
    c.reward_name.length > 1 ? pick("reward_name", "reward", c.reward_name) : null, field("reward_min", "reward from"), field("reward_max", "to"),
    pick("correct", "solved", [["true", "✓ yes"], ["false", "✗ no"]]), pick("outcome", "outcome", c.outcome), pick("status", "status", c.status),
    field("reason", "reason", "search", 10), field("lag_min", "lag from"), field("step_min", "step from"), field("step_max", "to"), field("version", "version"),
    field("group", "group", "search", 8), field("length_min", "length from"), field("length_max", "to"),
    pick("uniform", "returns in the group", [["true", "= equal"], ["false", "≠ different"]]));
}

function rows(page, given, go, query) {
  const sorted = (given.sort || "-place").replace(/^-/, "");
  const down = (given.sort || "-place").startsWith("-");
  const head = (name, title) => h("button", { type: "button", title: `sort by ${title}`, onclick: () => go({ sort: name === sorted && down ? name : `-${name}`, start: "" }) },
    title, name === sorted ? (down ? " ↓" : " ↑") : "");
  return table("trajectories", [
    [head("trajectory", "trajectory"), (r) => h("a", { href: address("trajectory", { run: given.run, id: r.trajectory, list: query }) }, r.trajectory)],
    [head("step", "step"), (r) => num(r.step)],
    [head("task", "set"), (r) => (r.evaluation ? `${r.evaluation}` : r.purpose)],
    [head("group", "group"), (r) => (r.purpose === "eval" ? "" : [h("a", { href: address("table", { run: given.run, group: r.group }) }, r.group), r.uniform ? " =" : ""])],
    [head("reward", "reward"), (r) => num(r.reward)],
    ["by name", (r) => Object.entries(r.rewards).map(([name, v]) => `${name} ${num(v)}`).join(", ")],
    ["solved", (r) => (r.correct === null ? "—" : r.correct ? "✓" : "✗")],
    [head("length", "length"), (r) => num(r.length)],
    [head("turns", "turns"), (r) => num(r.turns)],
    [head("version", "versions"), (r) => (r.versions ? (r.versions[0] === r.versions[1] ? `${r.versions[0]}` : r.versions.join("–")) : "—")],
    [head("lag", "lag"), (r) => num(r.lag)],
    ["outcome", became],
    ["end", (r) => (r.status === "finished" ? r.reason : `${r.status}: ${r.reason}`)],
    ["arrived", (r) => clock(r.at)],
  ], page.rows, { own: true, rowClass: (r) => (r.uniform ? "uniform" : null) });
}

function pages(page, given, go) {
  const last = Math.max(0, Math.floor((page.selected - 1) / 200) * 200);
  const to = (start) => () => go({ start: start || "" });
  return h("div", { class: "bar" },
    h("button", { type: "button", id: "previous", disabled: page.start === 0, onclick: to(Math.max(0, page.start - 200)) }, "newer (k)"),
    h("button", { type: "button", id: "next", disabled: page.start >= last, onclick: to(page.start + 200) }, "older (j)"),
    h("span", {}, page.selected ? `rows ${num(page.start + 1)} to ${num(Math.min(page.selected, page.start + 200))}; = marks a group whose returns are all equal` : ""),
    saveCsvButton("trajectories", () => [["trajectory", "step", "set", "group", "reward", "solved", "length", "turns", "versions", "lag", "outcome", "status", "reason"],
      ...page.rows.map((r) => [r.trajectory, r.step, r.evaluation || r.purpose, r.group, r.reward, r.correct === null ? null : String(r.correct), r.length, r.turns,
        r.versions ? r.versions.join("-") : null, r.lag, r.outcome, r.status, r.reason])]));
}
