// What differs between runs?

import { h, num, table, longText } from "./dom.js";
import { ask, address, exported } from "./data.js";
import { curves, smooth } from "./charts.js";

const METRICS = ["rollout/return_mean", "rollout/correct_share", "learner/policy_lag_mean_versions", "learner/entropy_nats", "learner/idle_share"];

export async function render(main, given, go) {
  const { runs } = await ask("runs");
  const chosen = (given.runs ? given.runs.split(",") : runs.map((run) => run.run)).filter((name) => runs.some((run) => run.run === name)).slice(0, 8);
  const page = await ask("differences", { runs: chosen.join(","), task: given.task });
  const names = given.metric && !METRICS.includes(given.metric) ? [...METRICS, given.metric] : METRICS;
  const all = await Promise.all(page.runs.map((run) => ask("metrics", { run, names: [...names, "learner/tokens_trained_total"].join(",") })));
  const by = given.x || "step";
  const xOf = (columns) => by === "time" ? (columns.time || []).map((t) => t - columns.time[0]) : by === "tokens" ? columns["learner/tokens_trained_total"] || [] : columns.step || [];
  const width = Number(given.smooth || 5);
  main.append(h("h1", {}, "What differs between runs?"),
    h("div", { class: "bar" }, exported() ? null : runs.map((run) => h("label", {}, h("input", { type: "checkbox", checked: chosen.includes(run.run), onchange: (e) =>
      go({ runs: (e.target.checked ? [...chosen, run.run] : chosen.filter((one) => one !== run.run)).join(",") }) }), run.run)),
      h("label", {}, "aligned by", h("select", { id: "x", onchange: (e) => go({ x: e.target.value }) },
        [["step", "learner step"], ["tokens", "trained tokens"], ["time", "wall time"]].map(([v, text]) => h("option", { value: v, selected: v === by }, text)))),
      h("label", {}, "mean over", h("select", { id: "smooth", onchange: (e) => go({ smooth: e.target.value }) }, ["1", "5", "20"].map((n) => h("option", { value: n, selected: Number(n) === width }, n))), "steps")),
    page.runs.length < 2 ? h("p", { class: "soft" }, "Only one run is shown. Name several: offbeat view RUN RUN") : "",
    table("runs", [["run", (i) => page.runs[i]], ["state", (i) => page.sentences[i]]], page.runs.map((_, i) => i)),
    h("h2", {}, "Curves"), h("div", { class: "grid" }, names.map((name) => curves(name, page.runs.map((run, i) => ({ run, columns: all[i].columns }))
      .filter(({ columns }) => name in columns).map(({ run, columns }) => ({ label: run, x: xOf(columns), y: smooth(columns[name], width) })),
      { xname: by === "time" ? "second" : by === "tokens" ? "token" : "step" })), heldOut(page)),
    h("h2", {}, "Results (± one standard error)"), results(page),
    h("h2", {}, "Settings that differ"),
    page.settings.length ? table("settings", [["setting", (r) => r.setting], ...page.runs.map((run, i) => [run, (r) => r.values[i] ?? "—"])], page.settings) : h("p", {}, "None differs."),
    h("h2", {}, "Package versions"), packages(page),
    h("h2", {}, "The same held-out task answered by each"), tasks(page, given, go));
}

function heldOut(page) {
  const lines = page.runs.map((run, i) => {
    const own = page.results[i].filter((one) => one.set === "" && one.accuracy !== null);
    return { label: run, x: own.map((one) => one.step), y: own.map((one) => one.accuracy), points: true,
      low: own.map((one) => one.accuracy - one.error), high: own.map((one) => one.accuracy + one.error) };
  }).filter((line) => line.x.length);
  return curves("held-out accuracy (bars: one standard error)", lines);
}

function results(page) {
  const rows = page.runs.flatMap((run, i) => page.results[i].map((one) => ({ run, ...one })));
  return rows.length ? table("results", [["run", (r) => r.run], ["set", (r) => r.set || "held-out"], ["step", (r) => num(r.step)],
    ["accuracy", (r) => (r.accuracy === null ? "—" : `${num(r.accuracy, 3)} ± ${num(r.error, 2)}`)], ["return", (r) => num(r.return)], ["answers", (r) => num(r.answered)]], rows)
    : h("p", { class: "soft" }, "— no evaluation was made");
}

function packages(page) {
  const names = [...new Set(page.packages.flatMap((one) => Object.keys(one || {})))].sort();
  if (!names.length) return h("p", { class: "soft" }, "— these runs did not note their package versions");
  const differ = names.filter((name) => new Set(page.packages.map((one) => one?.[name])).size > 1);
  return differ.length ? table("packages", [["package", (n) => n], ...page.runs.map((run, i) => [run, (n) => page.packages[i]?.[n] ?? "—"])], differ) : h("p", {}, "None differs.");
}

function tasks(page, given, go) {
  if (!page.tasks.length) return h("p", { class: "soft" }, "— the runs have answered no held-out task in common, or their journals are deleted");
  const shown = page.answers ? page.runs.map((run, i) => h("section", {}, h("h3", {}, run), page.answers[i].map((one) => h("div", { class: "card" },
    h("div", { class: "facts" }, h("a", { href: address("trajectory", { run, id: one.trajectory }) }, one.evaluation), h("span", {}, `reward ${num(one.reward)}`),
      h("span", {}, one.correct === null ? "solved —" : one.correct ? "✓ solved" : "✗ not solved"), h("span", {}, one.versions ? `version ${one.versions[0]}` : "version —")),
    one.why_missing ? h("p", { class: "soft" }, one.why_missing) : [longText(one.prompt ?? "—", "prompt"), longText(one.text ?? "—", "answer")])))) : null;
  return h("div", {}, h("div", { class: "bar" }, h("label", {}, "task", h("select", { id: "task", onchange: (e) => go({ task: e.target.value }) },
    h("option", { value: "" }, "choose"), page.tasks.map((n) => h("option", { value: n, selected: String(n) === given.task }, n))))), h("div", { class: "pair" }, shown));
}
