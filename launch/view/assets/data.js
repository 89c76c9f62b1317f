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

const ANSWERS = new Map();
let news = 0;

/** How many answers so far differed from the one before to the same question. */
export const newsCount = () => news;

/** Returns the answer to a question; if it is as before, the same object.  Throws an error whose message is for the reader. */
export async function ask(question, given = {}) {
  if (exported()) return askExport(question, given);
  const query = new URLSearchParams(Object.entries(given).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  const url = `api/${question}?${query}`;
  const before = ANSWERS.get(url);
  let response;
  try {
    response = await fetch(url, before ? { headers: { "If-None-Match": before.tag } } : {});
  } catch {
    throw new Error("the viewer does not answer; is `offbeat view` still running?");
  }
  if (response.status === 304) return before.answer;
  if (response.status === 401) throw new Error("Log in: open the link that `offbeat view` printed when it started.");
  const type = response.headers.get("Content-Type") || "";
  const answer = type.startsWith("application/json") ? await response.json() : { error: await response.text() };
  if (!response.ok) throw new Error(answer.error || `the viewer answers ${response.status}`);
  news += 1;
  ANSWERS.delete(url);
  const tag = response.headers.get("ETag");
  if (tag) ANSWERS.set(url, { tag, answer });
  if (ANSWERS.size > 40) ANSWERS.delete(ANSWERS.keys().next().value);
  return answer;
}

const METRICS = { key: "", mark: "", columns: {}, meanings: {} };

/** Returns columns of metrics. Of those that are known from before, only the new rows are sent. */
export async function metricsOf(run, names) {
  const given = { run, names: names.join(",") };
  if (exported()) return ask("metrics", given);
  const key = JSON.stringify(given);
  const mark = METRICS.key === key ? METRICS.mark : "";
  const part = await ask("metrics", { ...given, since: mark });
  if (mark && part.since === mark) {
    // Another call may have taken the same rows meanwhile.
    if (METRICS.key !== key || METRICS.mark !== mark) return metricsOf(run, names);
    const rows = METRICS.columns.step?.length ?? 0;
    for (const [name, values] of Object.entries(part.columns)) {
      METRICS.columns[name] ??= new Array(rows).fill(null);
      METRICS.columns[name].push(...values);
    }
    METRICS.mark = part.mark;
  } else {
    // The answer stays as it came, because the next one may be the same.
    const columns = Object.fromEntries(Object.entries(part.columns).map(([name, values]) => [name, [...values]]));
    Object.assign(METRICS, { key, mark: part.mark, columns, meanings: part.meanings });
  }
  return METRICS;
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
  if (question === "docs") return part(`docs-${given.page.replace(/\W/g, "-")}`);
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
