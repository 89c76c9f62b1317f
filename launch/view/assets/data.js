// Asks the server, or the files of an exported copy, and keeps the state of the page in its address.

import { shown } from "./dom.js";

/** The view that the address names: page and parameters. */
export function view() {
  const [page, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: page || "overview", given: Object.fromEntries(new URLSearchParams(query || "")) };
}

/** Returns the address of a view; parameters without a value are left out. */
export function address(page, given = {}) {
  const used = Object.entries(given).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(used).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

export const exported = () => window.OFFBEAT_EXPORT !== undefined;

/** Returns the answer to a question.  Throws an error whose message is for the reader. */
export async function ask(question, given = {}) {
  if (exported()) return askExport(question, given);
  const query = new URLSearchParams(Object.entries(given).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  let response;
  try {
    response = await fetch(`api/${question}?${query}`);
  } catch {
    throw new Error("the viewer does not answer; is `offbeat view` still running?");
  }
  if (response.status === 401) throw new Error("Log in: open the link that `offbeat view` printed when it started.");
  const type = response.headers.get("Content-Type") || "";
  const answer = type.startsWith("application/json") ? await response.json() : { error: await response.text() };
  if (!response.ok) throw new Error(answer.error || `the viewer answers ${response.status}`);
  return answer;
}

const files = new Map();

/** Loads a file of an exported copy. A page opened from file:// may load scripts, and no data. */
function part(name) {
  if (!files.has(name)) {
    files.set(name, new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = `data/${name}.js`;
      script.onload = () => done(window.OFFBEAT_EXPORT.parts[name]);
      script.onerror = () => failed(new Error("the copy does not have this; ask `offbeat view` on the run's machine"));
      document.head.append(script);
    }));
  }
  return files.get(name);
}

async function askExport(question, given) {
  if (question === "runs" || question === "differences") return part(question);
  const runs = (await part("runs")).runs;
  const place = Math.max(0, runs.findIndex((run) => run.run === given.run));
  if (question === "metrics") {
    const all = await part(`${place}-metrics`);
    const names = ["step", "time", ...(given.names || "").split(",")].filter((name) => name in all.columns);
    return { columns: Object.fromEntries(names.map((n) => [n, all.columns[n]])), meanings: all.meanings };
  }
  if (question === "samples") {
    const all = await part(`${place}-samples`);
    return { steps: all.steps, samples: all.samples.filter((one) => !given.step || one.step === Number(given.step)) };
  }
  if (question === "logs") {
    const all = await part(`${place}-logs`);
    return { lines: all.lines.filter((line) => (!given.process || line.process === given.process) &&
      (!given.level || line.level === given.level) && (!given.text || line.text.includes(given.text))) };
  }
  if (question === "table") return exportedTable(await part(`${place}-table`), given);
  if (question === "batch") return part(`${place}-batch-${given.step || "newest"}`);
  if (question === "trajectory") {
    const names = await part(`${place}-trajectories`);
    if (!(given.id in names)) throw new Error(`the copy does not have the tokens of ${shown(given.id)}`);
    return (await part(`${place}-tokens-${Math.floor(names[given.id] / 50)}`))[given.id];
  }
  return part(`${place}-${question}`);
}

const EQUAL = ["env", "purpose", "status", "evaluation", "group"];
const PART = { outcome: "outcome", reason: "reason", trajectory: "trajectory" };
const LEAST = { reward_min: "reward", lag_min: "lag", step_min: "step", length_min: "length" };
const MOST = { reward_max: "reward", step_max: "step", length_max: "length" };

/** Filters and sorts the rows of an exported copy as the server does. */
function exportedTable(all, given) {
  const tests = [];
  for (const name of EQUAL) if (given[name]) tests.push((row) => row[name] === given[name]);
  for (const [name, of] of Object.entries(PART)) if (given[name]) tests.push((row) => String(row[of]).includes(given[name]));
  for (const name of ["correct", "uniform"]) if (given[name]) tests.push((row) => String(row[name]) === given[name]);
  const value = (row, of) => of === "reward" && given.reward_name ? row.rewards[given.reward_name] ?? null : row[of];
  for (const [name, of] of Object.entries(LEAST)) {
    if (given[name]) tests.push((row) => value(row, of) !== null && value(row, of) >= Number(given[name]));
  }
  for (const [name, of] of Object.entries(MOST)) {
    if (given[name]) tests.push((row) => value(row, of) !== null && value(row, of) <= Number(given[name]));
  }
  if (given.task) tests.push((row) => row.task === given.task || row.task.endsWith(`-${given.task}`));
  if (given.version) tests.push((row) => row.versions && row.versions[0] <= given.version && row.versions[1] >= given.version);
  const rows = all.rows.filter((row) => tests.every((test) => test(row)));
  const sort = given.sort || "-place";
  const by = sort.replace(/^-/, "");
  if (by === "place") {
    // The copy has the newest first.
    if (sort === "place") rows.reverse();
  } else {
    const sign = sort.startsWith("-") ? -1 : 1;
    const of = (row) => (by === "version" ? row.versions && row.versions[1] : row[by]);
    rows.sort((a, b) => (of(a) === null) - (of(b) === null) || sign * (of(a) > of(b) ? 1 : of(a) < of(b) ? -1 : 0));
  }
  const start = Number(given.start || 0);
  const edges = all.histogram.edges;
  const counts = edges.slice(1).map((edge, i) =>
    rows.filter((row) => row.reward !== null && row.reward >= edges[i] - 1e-9 && row.reward < edge - 1e-9).length);
  return { ...all, failures: [], selected: rows.length, start, rows: rows.slice(start, start + 200),
    histogram: { edges, counts, missing: rows.filter((row) => row.reward === null).length } };
}
