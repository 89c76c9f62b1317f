// Is it learning, and what limits it?

import { h, num, clock, table, saveCsvButton, longText } from "./dom.js";
import { ask, address, metricsOf } from "./data.js";
import { curves, smooth } from "./charts.js";

const CHARTS = [
  ["reward, sampled", ["rollout/return_mean", "rollout/correct_share"]],
  ["length (tokens)", ["rollout/length_mean_tokens", "rollout/length_trained_mean_tokens"]],
  ["policy lag (versions)", ["learner/policy_lag_mean_versions", "learner/policy_lag_max_versions"], "bound"],
  ["share of the time without work", ["learner/idle_share", "generator/idle_share"]],
  ["failed and stale (share)", ["rollout/failed_share", "learner/stale_token_fraction"]],
  ["entropy, and loss of given answers (nats)", ["learner/entropy_nats", "learner/given_loss_nats"]],
  ["tokens per second", ["generator/tokens_per_second", "learner/trained_tokens_per_second"]],
];

/** Returns the page, and a function that brings it up to date: what has not changed stays as it is. */
export async function render(main, given, go) {
  const part = parts();
  const chosen = (given.metrics || "").split(",").filter(Boolean);
  const names = [...new Set([...CHARTS.flatMap(([, metrics]) => metrics), ...chosen])];
  const figures = new Map();
  const grid = h("div", { class: "grid" });
  const draw = (title, lines, options) => {
    const before = figures.get(title);
    if (before?.update?.(lines)) return;
    const figure = curves(title, lines, options);
    if (before) before.replaceWith(figure);
    else grid.append(figure);
    figures.set(title, figure);
  };
  const fill = async () => {
    const [page, metrics, known, found] = await Promise.all([ask("overview", { run: given.run }), metricsOf(given.run, names),
      ask("names", { run: given.run }), ask("logs", { run: given.run, ...logsOf(given), count: LOG_LINES })]);
    const columns = metrics.columns;
    const byTime = given.x === "time" && page.clock;
    const xs = (byTime ? columns.time : columns.step) || [];
    const open = (x) => {
      const i = byTime ? columns.time.indexOf(x) : -1;
      location.hash = address("samples", { run: given.run, step: byTime ? columns.step[i] : x });
    };
    const lines = (wanted) => wanted.filter((name) => name in columns).map((name) =>
      ({ label: name, x: xs, y: smooth(columns[name], Number(given.smooth || 1)) }));
    draw("held-out results (bars: one standard error)", heldOut(page, byTime), { time: byTime, onpoint: byTime ? undefined : open });
    for (const [title, wanted, bound] of [...CHARTS, ...chosen.map((name) => [name, [name]])]) {
      draw(title, lines(wanted), { time: byTime, onpoint: open, bound: bound && page.bound !== null ? page.bound : undefined });
    }
    return [
      part("sentence", page.sentence, () => h("p", { class: "sentence", id: "sentence" }, page.sentence)),
      part("over", page.over, () => (page.over.length ? h("p", { class: "soft" }, page.over.join(" ")) : h("span"))),
      part("findings", [page.alarms, page.advice], () => findings(page, given)),
      part("controls", page.clock, () => controls(given, page, go)), grid,
      part("explorer", known.names.length, () => explorer(known.names, chosen, given, go)),
      part("processes", page.processes, () => h("section", {}, h("h2", {}, "Processes"), processes(page))),
      part("logs", found, () => h("section", {}, h("h2", {}, "Logs"), logs(page, found, given, go))),
      part("settings", page.settings, () => h("section", {}, h("h2", {}, "Settings that differ from the default"), settings(page))),
      part("notes", page.notes, () => notes(page))];
  };
  main.append(h("h1", {}, "Is it learning, and what limits it?"), ...await fill());
  return fill;
}

/** Returns a function that keeps parts of a page: a part is made anew only if what it shows has changed. */
function parts() {
  const known = new Map();
  return (name, of, make) => {
    const text = JSON.stringify(of);
    const before = known.get(name);
    if (before?.text === text) return before.node;
    const node = make();
    before?.node.replaceWith(node);
    known.set(name, { text, node });
    return node;
  };
}

function findings(page, given) {
  const one = (finding) => h("li", { class: finding.kind },
    h("b", {}, finding.kind === "alarm" ? "▲ " : "● ", finding.title), `: ${finding.value}. `,
    h("span", {}, `Threshold: ${finding.threshold}. `), h("a", { href: address("docs", { run: given.run, page: finding.docs }) }, `docs/${finding.docs}`));
  const found = page.alarms.length ? page.alarms : page.advice;
  if (!found.length) return h("p", { id: "findings" }, "✓ No alarm.");
  return h("ul", { class: "found", id: "findings", "aria-label": page.alarms.length ? "alarms" : "advice" }, found.map(one));
}

function controls(given, page, go) {
  return h("div", { class: "bar" },
    h("label", {}, "x axis", h("select", { id: "x", onchange: (e) => go({ x: e.target.value }) },
      h("option", { value: "step", selected: given.x !== "time" }, "learner step"),
      h("option", { value: "time", selected: given.x === "time", disabled: !page.clock }, page.clock ? "wall time" : "wall time —"))),
    h("label", {}, "mean over", h("select", { id: "smooth", onchange: (e) => go({ smooth: e.target.value }) },
      ["1", "5", "20", "100"].map((n) => h("option", { value: n, selected: n === (given.smooth || "1") }, n))), "steps"),
    h("span", { class: "soft" }, "A click on a point opens what was written in that step. Drag to enlarge, double-click to go back."));
}

function heldOut(page, byTime) {
  const sets = [...new Set(page.evaluations.map((one) => one.set))];
  return sets.map((name) => {
    const own = page.evaluations.filter((one) => one.set === name);
    const solved = own.some((one) => one.accuracy !== null);
    const y = own.map((one) => (solved ? one.accuracy : one.return));
    return { label: `${name || "held-out"} ${solved ? "accuracy" : "return"}`, x: own.map((one) => (byTime ? one.at : one.step)), y, points: true,
      low: solved ? own.map((one, i) => y[i] - one.error) : null, high: solved ? own.map((one, i) => y[i] + one.error) : null };
  });
}

function explorer(names, chosen, given, go) {
  const list = h("div", { id: "metric-list" });
  const input = h("input", { id: "filter", type: "search", value: given.match || "", size: 30, placeholder: "for example ^learner/ratio",
    "aria-label": "regular expression over all metrics" });
  const fill = () => {
    let pattern;
    try {
      pattern = new RegExp(input.value, "i");
    } catch (error) {
      list.replaceChildren(h("p", { class: "error" }, `not a regular expression: ${error.message}`));
      return;
    }
    const found = input.value ? names.filter(({ name }) => pattern.test(name)) : names.filter(({ name }) => chosen.includes(name));
    list.replaceChildren(found.length ? table("metrics", [
      ["drawn", ({ name }) => h("input", { type: "checkbox", checked: chosen.includes(name), "aria-label": `draw ${name}`, onchange: (e) =>
        go({ match: input.value, metrics: (e.target.checked ? [...chosen, name].slice(-12) : chosen.filter((one) => one !== name)).join(",") }) })],
      ["metric", ({ name }) => name], ["unit", ({ unit }) => unit], ["meaning", ({ meaning }) => meaning || "—"],
    ], found.slice(0, 300)) : h("p", { class: "soft" }, input.value ? "no metric has such a name" : `${names.length} metrics; type a part of a name`));
  };
  input.addEventListener("input", fill);
  fill();
  return h("section", {}, h("h2", {}, "All metrics"), h("div", { class: "bar" }, h("label", {}, "filter (/)", input)), list);
}

function processes(page) {
  if (!page.processes.length) return h("p", { class: "soft" }, "— no supervisor has written which processes there are");
  const several = page.processes.some((p) => p.host);
  return table("processes", [
    ...(several ? [["host", (p) => p.host || "head"]] : []), ["process", (p) => p.name], ["pid", (p) => String(p.pid ?? "—")], ["state", (p) => p.state], ["started", (p) => clock(p.started)],
    ["restarts", (p) => num(p.restarts)],
    ["why", (p) => (p.endings.length ? p.endings.map((e) => h("div", {}, `${clock(e.time)} ${e.reason}`)) : p.reason || "")],
  ], page.processes);
}

const LOG_LINES = 200;
const logsOf = (given) => ({ process: given.process, level: given.level, text: given.log });

function logs(page, found, given, go) {
  const pick = (name, label, values) => h("label", {}, label, h("select", { id: name, onchange: (e) => go({ [name]: e.target.value }) },
    h("option", { value: "" }, "all"), values.map((v) => h("option", { value: v, selected: v === given[name] }, v))));
  return h("div", {},
    h("div", { class: "bar" }, pick("process", "process", [...page.processes.map((p) => p.name), "model"]),
      pick("level", "at least", ["INFO", "WARNING", "ERROR"]),
      h("label", {}, "text", h("input", { type: "search", value: given.log || "", onchange: (e) => go({ log: e.target.value }) })),
      saveCsvButton("logs", async () => [["time", "process", "level", "text"],
        ...(await ask("logs", { run: given.run, ...logsOf(given) })).lines.map((l) => [l.at, l.process, l.level, l.text])])),
    found.lines.length ? table("log lines", [["time", (l) => l.at || "—"], ["process", (l) => l.process], ["level", (l) => l.level],
      ["text", (l) => l.text]], found.lines.slice(-LOG_LINES).reverse(), { own: true }) : h("p", { class: "soft" }, "— no such line"));
}

function settings(page) {
  if (page.settings === null) return h("p", { class: "soft" }, "— the settings are of another version and cannot be read");
  return table("settings", [["setting", (r) => r.setting], ["value", (r) => r.value], ["default", (r) => r.default || "—"]], page.settings);
}

function notes(page) {
  if (!page.notes.length) return h("span");
  return h("section", {}, h("h2", {}, "What the learner noted"),
    page.notes.map((note) => h("div", { class: "card" }, h("span", { class: "soft" }, `step ${num(note.step)}, ${clock(note.at)} `), note.text)));
}

/** What was written in a step: the learner's samples. */
export async function renderSamples(main, given, go) {
  const page = await ask("samples", { run: given.run, step: given.step });
  const steps = page.steps;
  const at = steps.indexOf(Number(given.step));
  main.append(h("h1", {}, given.step ? `What did it write in step ${given.step}?` : "What did it write last?"),
    h("div", { class: "bar" },
      h("label", {}, "step", h("select", { id: "step", onchange: (e) => go({ step: e.target.value }) }, h("option", { value: "" }, "newest"),
        steps.map((n) => h("option", { value: n, selected: String(n) === given.step }, n)))),
      h("button", { type: "button", id: "previous", disabled: at < 1, onclick: () => go({ step: steps[at - 1] }) }, "previous (k)"),
      h("button", { type: "button", id: "next", disabled: at < 0 || at >= steps.length - 1, onclick: () => go({ step: steps[at + 1] }) }, "next (j)"),
      h("a", { href: address("table", { run: given.run, step_min: given.step, step_max: given.step }) }, "all trajectories of the step")),
    page.samples.length ? page.samples.map((one) => sampleCard(one, given)) : h("p", {}, "— no sample of this step is kept; all trajectories of the step may be in the journal"));
}

function sampleCard(one, given) {
  const fact = (name, value) => h("span", {}, h("b", {}, `${name} `), value);
  return h("article", { class: "card" },
    h("div", { class: "facts" },
      one.trajectory ? h("a", { href: address("trajectory", { run: given.run, id: one.trajectory }) }, one.task) : h("b", {}, one.task),
      fact("step", num(one.step)), fact(one.split === "heldout" ? "held-out" : "training", one.evaluation || one.chosen),
      fact("return", num(one.return)), Object.entries(one.rewards).map(([name, value]) => fact(`reward "${name}"`, num(value))),
      fact("advantage", num(one.advantage)), fact("versions", one.versions ? one.versions.join("–") : "—"), fact("lag", num(one.lag)),
      fact("solved", one.correct === null ? "—" : one.correct ? "✓ yes" : "✗ no"), fact("end", one.failure || one.end),
      one.target !== null && one.target !== undefined ? [fact("answer", one.answer ?? "—"), fact("target", one.target)] : null),
    one.parts.map((part) => h("div", {}, h("span", { class: "soft" }, `${part.kind} (${part.tokens} tokens)`), longText(part.text, part.kind))));
}

