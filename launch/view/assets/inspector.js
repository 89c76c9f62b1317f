// One trajectory: turns, branches, and every token with its version, lag and weight.

import { h, num, seconds, longText, table, csv, save } from "./dom.js";
import { ask, address } from "./data.js";
import { became, listOf } from "./trajectories.js";

const SHADES = [
  ["version", "policy version"], ["lag", "policy lag when it was trained"], ["logp", "behaviour log-probability"],
  ["logp_current", "learner's log-probability"], ["logp_proximal", "proximal log-probability"], ["ratio", "importance ratio"], ["weight", "correction weight"],
  ["advantage", "advantage"], ["entropy", "entropy"], ["cut", "clipped or masked"],
];
const TABS = ["text", "tokens", "shaded"];
const MOST_SPANS = 8000;

export async function render(main, given, go) {
  const page = await ask("trajectory", { run: given.run, id: given.id });
  const ids = given.list ? await listOf(given.list).catch(() => []) : [];
  const at = ids.indexOf(page.trajectory);
  const other = (id) => address("trajectory", { ...given, id });
  const tab = TABS.includes(given.tab) ? given.tab : "text";
  const branch = Math.min(page.branches.length - 1, Number(given.branch || 0));
  main.append(
    h("h1", {}, "What did it write here, and what did the learner make of it?"),
    h("div", { class: "bar" },
      step("previous", "previous (k)", ids[at - 1], other), step("next", "next (j)", at >= 0 ? ids[at + 1] : undefined, other),
      neighbours(page, other),
      given.list ? h("a", { href: `#/table?${given.list}` }, "to the list") : h("a", { href: address("table", { run: given.run, group: page.group }) }, "its group"),
      page.evaluation ? null : h("a", { href: address("timeline", { run: given.run, step: page.step ?? "" }) }, "its batch")),
    facts(page), answer(page),
    h("div", { class: "tabs", role: "group", "aria-label": "what is shown" },
      TABS.map((name) => h("button", { type: "button", "aria-pressed": String(name === tab), onclick: () => go({ tab: name }) }, name)),
      h("button", { type: "button", id: "next-tab", class: "small", onclick: () => go({ tab: TABS[(TABS.indexOf(tab) + 1) % 3] }) }, "t"),
      page.branches.length > 1 ? page.branches.map((turns, i) => h("button", { type: "button", "aria-pressed": String(i === branch), onclick: () => go({ branch: i }) },
        `branch ${i + 1} (${turns.length} turns)`)) : null));
  if (page.first_token) main.append(h("p", { class: "soft" }, `The first ${page.first_token} tokens are in a file of the journal that is deleted; keep more with broker.journal.keep_bytes.`));
  if (!page.words_known) main.append(h("p", { class: "soft" }, "— the run's tokenizer is not on this machine, so tokens are shown by their ids"));
  if (page.all_tokens > page.first_token + page.tokens.id.length) main.append(h("p", { class: "soft" }, `${num(page.all_tokens)} tokens; the first ${num(page.tokens.id.length)} are shown.`));
  const turns = page.branches[branch].map((index) => page.turns.find((turn) => turn.index === index)).filter(Boolean);
  if (tab === "text") main.append(...turns.map((turn) => turnBlock(page, turn, textOf(page, turn))));
  else tokens(main, page, turns, tab, given, go);
  if (page.branches.length > 1) main.append(h("h2", {}, "Turns"), tree(page));
  main.append(h("h2", {}, page.evaluation ? "The same task in all evaluations" : "Its group"), siblings(page, other));
  if (page.extra !== "{}") main.append(h("h2", {}, "What the environment says"), longText(page.extra));
}

const step = (id, title, target, other) => h("button", { type: "button", id, disabled: target === undefined, onclick: () => { location.hash = other(target); } }, title);

function neighbours(page, other) {
  const ids = page.siblings.map((one) => one.trajectory);
  const at = ids.indexOf(page.trajectory);
  return [step("sibling-previous", "[ in the group", at > 0 ? ids[at - 1] : undefined, other), step("sibling-next", "] in the group", ids[at + 1], other)];
}

function facts(page) {
  const fact = (name, value) => h("span", {}, h("b", {}, `${name} `), value);
  return h("div", { class: "facts card", id: "facts" },
    fact("trajectory", page.trajectory), fact("environment", page.env || "—"), fact("set", page.evaluation || page.purpose), fact("group", `${page.group}${page.uniform ? " (equal returns: it teaches nothing)" : ""}`),
    fact("origin", page.origin || "—"), fact("step", num(page.step)), fact("outcome", became(page)), fact("status", page.status), fact("end", page.failure || page.reason || "—"),
    fact("sampled tokens", num(page.length)), fact("tokens", num(page.tokens.id.length)), fact("turns", num(page.turns.length)),
    fact("versions", page.versions ? [...new Set(page.versions)].join("–") : "—"), fact("largest lag", `${num(page.lag)} (bound ${num(page.bound)})`),
    fact("generators", page.generators.join(", ") || "—"), fact("temperature", num(page.temperature)));
}

/** Returns the mean of what is known; null where nothing is. */
function meanOf(values) {
  const known = (values ?? []).filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function answer(page) {
  const one = page.sample;
  return h("div", { class: "facts card" },
    h("span", {}, h("b", {}, "reward "), num(page.reward)), Object.entries(page.rewards).map(([name, value]) => h("span", {}, h("b", {}, `reward "${name}" `), num(value))),
    h("span", {}, h("b", {}, "return trained on "), num(one?.return)), h("span", {}, h("b", {}, "mean advantage "), num(one?.advantage ?? meanOf(page.tokens.advantage))),
    h("span", {}, h("b", {}, "solved "), page.correct === null ? "—" : page.correct ? "✓ yes" : "✗ no"),
    h("span", { id: "answer" }, h("b", {}, "answer "), page.answer ?? "—"), h("span", { id: "target" }, h("b", {}, "target "), page.target ?? "—"));
}

const textOf = (page, turn) => (turn.text === null ? page.tokens.id.slice(Math.max(0, turn.start), turn.end).join(" ") : turn.text);

function turnBlock(page, turn, text) {
  const rewards = page.turn_rewards.filter((one) => one.turn === turn.index).map((one) => `${one.name} ${num(one.value)}`);
  const marks = page.marks.filter((one) => one.turn === turn.index).map((one) => `${one.name} ${typeof one.value === "number" ? num(one.value) : one.value}`);
  const time = page.times.find((one) => one.turn === turn.index);
  return h("section", { class: "turn" },
    h("div", { class: "facts soft" }, h("b", {}, `turn ${turn.index}: ${turn.action ? "sampled" : turn.index ? "observation" : "prompt"}`),
      h("span", {}, `${turn.end - turn.start} tokens`), turn.back !== 1 && turn.index ? h("span", {}, turn.back ? `continues turn ${turn.index - turn.back}` : "begins anew") : null,
      page.auxiliary.includes(turn.index) ? h("span", {}, "auxiliary: not trained") : null,
      rewards.length ? h("span", {}, `rewards: ${rewards.join(", ")}`) : null, marks.length ? h("span", {}, marks.join(", ")) : null,
      time ? h("span", {}, `waited ${seconds(time.waited)}, sampled ${seconds(time.sampled)}, tools ${seconds(time.tools)}`) : null),
    longText(text, turn.action ? "answer" : turn.index ? "observation" : "prompt"));
}

/** Tokens one by one, plain or shaded by one of their facts; the facts of the token under the pointer stand below. */
function tokens(main, page, turns, tab, given, go) {
  const columns = page.tokens;
  const kept = columns.logp_current?.some((value) => value !== null);
  // No cut at all is known, too, where the learner kept what it made of the tokens.
  const known = SHADES.filter(([name]) => name in columns && (name === "cut" ? kept : columns[name].some((value) => value !== null)));
  const shade = tab === "shaded" ? (SHADES.some(([name]) => name === given.shade) ? given.shade : "lag") : null;
  // Where the gradient was cut is a yes or no; its reason stands below.
  if (columns.cut) columns.was_cut = columns.cut.map((why, i) => (columns.action[i] ? Number(Boolean(why)) : null));
  const source = shade === "cut" ? "was_cut" : shade;
  const values = source && columns[source] ? columns[source].filter((value) => value !== null).map(Number) : [];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const signed = shade === "advantage";
  const width = signed ? Math.max(Math.abs(low), Math.abs(high)) || 1 : high - low || 1;
  const much = (value) => (signed ? Math.abs(value) / width : (value - low) / width);
  const hover = h("div", { class: "hover", "aria-live": "polite", id: "token" }, h("span", { class: "soft" }, "point at a token, or move to it with Tab or the arrow keys"));
  if (shade) {
    main.append(h("div", { class: "bar" }, h("label", {}, "shade by", h("select", { id: "shade", onchange: (e) => go({ shade: e.target.value }) },
      SHADES.map(([name, title]) => h("option", { value: name, selected: name === shade }, known.some(([k]) => k === name) ? title : `${title} —`)))),
      values.length ? legend(low, high, signed, much) : h("span", {}, "— this was not kept for this trajectory, which differs from 0")));
  }
  const told = kept || columns.cut?.some(Boolean);
  if (shade && (told || page.outcome === "trained")) main.append(h("p", { id: "cuts" }, told ? cuts(columns) : masked(columns, page.bound)));
  const box = h("div", { class: `tokens ${tab === "tokens" ? "boxed" : ""}` });
  let spans = 0;
  for (const turn of turns) {
    box.append(h("div", { class: "facts soft" }, h("b", {}, `turn ${turn.index}: ${turn.action ? "sampled" : turn.index ? "observation" : "prompt"}`),
      page.turn_rewards.filter((one) => one.turn === turn.index).map((one) => h("span", {}, `${one.name} ${num(one.value)}`))));
    const line = h("div");
    for (let i = Math.max(0, turn.start); i < Math.min(turn.end, columns.id.length); i++) {
      if (++spans > MOST_SPANS) break;
      const word = columns.word[i] ?? `${columns.id[i]} `;
      const value = source && columns[source] ? columns[source][i] : undefined;
      const kind = !columns.action[i] ? "o" : shade && (value === null || value === undefined) ? "unknown" : shade ? "shade" : "";
      const cut = columns.cut?.[i] ? " cut" : "";
      line.append(h("span", { class: `t ${kind}${cut}`, "data-i": i, tabindex: spans === 1 ? 0 : -1,
        set: kind === "shade" ? { "--much": `${Math.round(8 + 62 * much(value))}%`, "--shade": `var(--${signed && value < 0 ? "c1" : "c0"})` } : undefined }, visible(word)));
      if (/\n$/.test(word)) line.append(h("br"));
    }
    box.append(line);
  }
  const look = (target) => {
    const span = target.closest?.(".t");
    if (!span) return;
    box.querySelector(".chosen")?.classList.remove("chosen");
    span.classList.add("chosen");
    hover.replaceChildren(...tokenFacts(page, Number(span.dataset.i)));
  };
  box.addEventListener("mouseover", (event) => look(event.target));
  box.addEventListener("focusin", (event) => look(event.target));
  box.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way) return;
    const all = [...box.querySelectorAll(".t")];
    const next = all[all.indexOf(document.activeElement) + way];
    if (next) { document.activeElement.tabIndex = -1; next.tabIndex = 0; next.focus(); event.preventDefault(); }
  });
  main.append(box, spans > MOST_SPANS ? h("p", { class: "soft" }, `Only ${num(MOST_SPANS)} tokens are drawn; the CSV has all.`) : "", hover,
    h("button", { type: "button", class: "small", onclick: () => save(`${page.trajectory}.csv`, "text/csv", csv([["token", ...Object.keys(columns)],
      ...columns.id.map((_, i) => [page.first_token + i, ...Object.values(columns).map((column) => (typeof column[i] === "boolean" ? String(column[i]) : column[i]))])])) }, "CSV of all tokens"));
}

/** Says how many sampled tokens each reason cut from the gradient. */
function cuts(columns) {
  const counts = new Map();
  columns.cut.forEach((why, i) => { if (columns.action[i] && why) counts.set(why, (counts.get(why) ?? 0) + 1); });
  const of = columns.action.filter(Boolean).length;
  return counts.size ? `Of ${num(of)} sampled tokens: ${[...counts].map(([why, n]) => `${num(n)} ${why}`).join("; ")}.` : `No bound cut the gradient of any of ${num(of)} sampled tokens.`;
}

/** Says the same of a trajectory of which the learner kept nothing: its versions and the bound say what was masked. */
function masked(columns, bound) {
  const of = columns.action.filter(Boolean).length;
  const beyond = bound === null ? 0 : columns.lag.filter((lag, i) => columns.action[i] && lag !== null && lag > bound).length;
  const first = beyond ? `Of ${num(of)} sampled tokens: ${num(beyond)} masked, because their lag is beyond the bound ${num(bound)}.` : `The lag bound masked none of ${num(of)} sampled tokens.`;
  return beyond === of ? first : `${first} Whether ${beyond ? "others" : "they"} were clipped was not kept.`;
}

const visible = (word) => (word === "" ? "∅" : word.replace(/\n/g, "⏎").replace(/\t/g, "⇥"));

function tokenFacts(page, i) {
  const c = page.tokens;
  const fact = (name, value) => h("span", {}, h("b", {}, `${name} `), value);
  const acts = c.action[i];
  const bound = page.bound;
  const beyond = acts && c.lag[i] !== null && bound !== null && c.lag[i] > bound;
  return [h("div", { class: "facts" }, fact("token", num(page.first_token + i)), fact("id", String(c.id[i])), fact("text", c.word[i] === null ? "—" : JSON.stringify(c.word[i])),
    fact("kind", acts ? "sampled" : "observation"), fact("version", num(c.version[i])), fact("lag", num(c.lag[i])), fact("log-probability", num(c.logp[i])),
    SHADES.filter(([name]) => !["version", "lag", "logp", "cut"].includes(name)).map(([name, title]) => fact(title, num(c[name]?.[i]))),
    fact("gradient", !acts ? "none: it was not sampled" : c.cut?.[i] ? c.cut[i] : "cut" in c ? (c.ratio?.[i] === null && c.logp_current?.[i] === null ? "—" : "carried") : beyond ? `masked: lag ${c.lag[i]} is beyond the bound ${bound}` : page.outcome === "trained" ? "not masked by lag; whether it was clipped was not kept" : `none: ${page.outcome}`))];
}

function legend(low, high, signed, much) {
  const whole = Number.isInteger(low) && Number.isInteger(high) && high - low < 12;
  const at = whole && !signed ? Array.from({ length: high - low + 1 }, (_, i) => low + i) : signed ? [-Math.max(Math.abs(low), Math.abs(high)), 0, Math.max(Math.abs(low), Math.abs(high))] : [0, 0.5, 1].map((f) => low + f * (high - low));
  return h("span", { class: "legend" }, at.map((value) => h("span", {}, h("i", { set: { "--much": `${Math.round(8 + 62 * much(value))}%`, "--shade": `var(--${signed && value < 0 ? "c1" : "c0"})` } }), num(value, 3))),
    h("span", { class: "o" }, "grey: not sampled"), h("span", {}, "hatched: not known"), h("span", {}, "dotted below: clipped or masked"));
}

function tree(page) {
  const depth = new Map();
  for (const turn of page.turns) depth.set(turn.index, turn.back && turn.index ? (depth.get(turn.index - turn.back) ?? 0) + (turn.back === 1 ? 0 : 1) : 0);
  return h("div", {}, page.turns.map((turn) => h("div", { set: { "padding-left": `${1.2 * depth.get(turn.index)}rem` } },
    `${turn.back === 1 ? "│" : "└"} turn ${turn.index}, ${turn.action ? "sampled" : "observation"}, ${turn.end - turn.start} tokens`)));
}

function siblings(page, other) {
  return table("siblings", [["trajectory", (r) => h("a", { href: other(r.trajectory) }, r.trajectory)], ["set", (r) => r.evaluation || "training"],
    ["reward", (r) => num(r.reward)], ["solved", (r) => (r.correct === null ? "—" : r.correct ? "✓" : "✗")], ["status", (r) => r.status],
    ["length", (r) => num(r.length)], ["step", (r) => num(r.step)], ["outcome", (r) => became(r)],
    ["what it wrote", (r) => (r.text === null ? "—" : h("pre", { class: "text answer" }, r.text.slice(0, 1200)))]], page.siblings,
    { rowClass: (r) => (r.trajectory === page.trajectory ? "now" : null) });
}

