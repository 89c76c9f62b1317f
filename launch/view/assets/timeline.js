// Who waited for whom?

import { h, s, num, percent, seconds, clock, table } from "./dom.js";
import { ask, address } from "./data.js";
import { drawing, painted, swatch } from "./charts.js";

const PARTS = [["wait", "waits for a batch", "wait"], ["gpu_wait", "waits for the GPU", "c6"], ["update", "updates", "update"],
  ["publish", "publishes", "publish"]];
const EVALUATES = ["evaluate", "stands for an evaluation", "c7"];
const LEARNER = [...PARTS, EVALUATES];

export async function render(main, given, go) {
  const page = await ask("timeline", { run: given.run });
  const newest = page.steps.at(-1)?.step;
  const batch = newest ? await ask("batch", { run: given.run, step: given.step }) : null;
  const total = Object.values(page.totals).reduce((sum, value) => sum + (value ?? 0), 0);
  // Each step has the pause of the newest update, so a version's own is that of the steps in which it was in service.
  const pauses = new Map(page.steps.filter((step) => step.generators.version > 0 && step.generators.pause !== null)
    .map((step) => [Math.floor(step.generators.version), step.generators.pause]));
  const known = [...pauses.values()];
  main.append(
    h("h1", {}, "Who waited for whom?"),
    page.clock ? "" : h("p", { class: "soft" }, "— this run has no wall clock in its metrics: steps stand one behind the other, by their own durations"),
    h("p", { class: "facts", id: "learner" }, LEARNER.map(([name, title]) => h("span", {}, h("b", {}, `learner ${title} `),
      `${seconds(page.totals[name])} (${total && page.totals[name] !== null ? percent(page.totals[name] / total) : "—"})${
        name === "wait" && page.first_wait !== null ? `, ${seconds(page.first_wait)} of it for the first batch, while all start` : ""}`))),
    h("p", { class: "facts", id: "turns" }, page.turns ? TURN.map(([name, title]) => h("span", {}, h("b", {}, `episodes: ${title} `),
      `${seconds(page.turns[name])} (${percent(page.turns[name] / TURN.reduce((sum, [one]) => sum + page.turns[one], 0))})`))
      : "— nobody measured the seconds of turns in this run"),
    h("p", { class: "facts", id: "pauses" }, h("span", {}, h("b", {}, "generators: pause for a new version, mean "),
      known.length ? `${seconds(known.reduce((sum, one) => sum + one, 0) / known.length)}, longest ${seconds(Math.max(...known))}` : "—")),
    page.steps.length ? roles(page, given, pauses) : h("p", {}, "— no learner step was made"),
    page.generators.length ? h("section", {}, h("h2", {}, "Generators"), table("generators", [["generator", (g) => g.name || "—"],
      ["trajectories", (g) => num(g.trajectories)], ["sampled tokens in the journal", (g) => num(g.tokens)],
      ["versions", (g) => (g.spans.length ? `${g.spans[0].version}–${g.spans.at(-1).version}` : "—")]], page.generators)) : "");
  if (page.restarts.length) main.append(h("h2", {}, "Processes that ended"), table("endings",
    [["time", (r) => clock(r.at)], ["process", (r) => r.process], ["why", (r) => r.reason]], page.restarts));
  if (batch) anatomy(main, batch, given, go);
}

function roles(page, given, pauses) {
  const steps = page.steps.slice(-120);
  const [width, left] = [1100, 120];
  const began = (step) => step.ended - PARTS.reduce((sum, [name]) => sum + (step[name] ?? 0), 0);
  // The evaluation before the first step that is drawn, and those after the last one, belong to the figure.
  const evaluated = page.clock ? page.evaluations.filter((one) => one.step >= steps[0].step - 1) : [];
  const last = Math.max(...steps.map((step) => step.ended), ...evaluated.map((one) => one.at));
  // The wait for the first batch is the start of all processes. Where it is longer than all steps, its beginning is cut.
  const stood = evaluated.map((one) => one.at - (one.stood ?? 0));
  const begun = Math.min(began(steps[0]), ...stood);
  const first = page.clock && steps.length > 3 ? Math.max(begun, Math.min(steps[0].ended - (last - steps[0].ended) / 4, ...stood)) : begun;
  const px = (at) => left + (width - left - 10) * Math.max(0, at - first) / Math.max(1e-9, last - first);
  const names = page.generators.filter((g) => g.spans.length);
  const rows = 1 + Math.max(1, names.length) + 1;
  const svg = s("svg", { viewBox: `0 0 ${width} ${rows * 34 + 40}` });
  svg.append(s("text", { x: 0, y: 24 }, "learner"));
  for (const step of steps) {
    let at = began(step);
    const link = s("a", { href: address("timeline", { run: given.run, step: step.step }),
      "aria-label": `step ${step.step}: waited ${num(step.wait)} s, updated ${num(step.update, 3)} s` });
    for (const [name, title, paint] of PARTS) {
      const value = step[name];
      if (!value) continue;
      link.append(s("rect", { x: px(at), y: 10, width: Math.max(0.6, px(at + value) - px(at)), height: 22, ...painted(paint) }, s("title", {}, `step ${step.step}: ${title} ${seconds(value)}`)));
      at += value;
    }
    svg.append(link);
  }
  const [, stands, paint] = EVALUATES;
  for (const one of evaluated) {
    const at = one.at - (one.stood ?? 0);
    const title = `evaluation ${one.set || "held-out"} of step ${num(one.step)}: ${stands} ${seconds(one.stood)}, over ${clock(one.at)}`;
    svg.append(one.stood ? s("rect", { x: px(at), y: 10, width: Math.max(1, px(one.at) - px(at)), height: 22, fill: `var(--${paint})` }, s("title", {}, title))
      : s("line", { x1: px(one.at), x2: px(one.at), y1: 6, y2: 34, stroke: `var(--${paint})`, "stroke-width": 2 }, s("title", {}, title)));
  }
  let y = 44;
  if (names.length) {
    for (const generator of names) {
      svg.append(s("text", { x: 0, y: y + 15 }, generator.name.slice(0, 18)));
      for (const span of generator.spans) {
        if (span.to < first) continue;
        const x = Math.max(left, px(span.from));
        const wide = Math.max(1, px(span.to) - x);
        svg.append(s("rect", { x, y, width: wide, height: 22, fill: "var(--sample)", "fill-opacity": 0.35 + 0.3 * (span.version % 3) },
          s("title", {}, `${generator.name}: first token of version ${span.version} arrived ${clock(span.from)}, after a pause of ${seconds(pauses.get(span.version))} for the update`)));
        if (wide > 26) svg.append(s("text", { x: x + 2, y: y + 15 }, `v${span.version}`));
      }
      y += 34;
    }
  } else {
    svg.append(s("text", { x: 0, y: y + 15 }, "generators"));
    for (const step of steps) {
      const idle = step.generators.idle;
      if (idle === null) continue;
      const x = px(began(step));
      svg.append(s("rect", { x, y: y + 22 * idle, width: Math.max(0.6, px(step.ended) - x), height: 22 * (1 - idle), fill: "var(--sample)",
        "fill-opacity": 0.35 + 0.3 * ((step.generators.version ?? 0) % 3) },
        s("title", {}, `step ${step.step}: version ${num(step.generators.version)} in service, idle ${percent(idle)}, last pause ${seconds(step.generators.pause)}`)));
    }
    y += 34;
  }
  svg.append(s("text", { x: 0, y: y + 15 }, "actors"));
  const most = Math.max(1, ...steps.map((step) => step.actors.episodes ?? 0));
  for (const step of steps) {
    const running = step.actors.episodes;
    if (running === null) continue;
    const x = px(began(step));
    svg.append(s("rect", { x, y: y + 22 * (1 - running / most), width: Math.max(0.6, px(step.ended) - x), height: 22 * running / most, fill: "var(--tool)" },
      s("title", {}, `step ${step.step}: ${num(running)} episodes under way, ${seconds(step.actors.env_seconds)} in the environment each`)));
  }
  for (const restart of page.restarts) {
    if (restart.at === null || restart.at < first || restart.at > last) continue;
    svg.append(s("line", { x1: px(restart.at), x2: px(restart.at), y1: 4, y2: y + 26, stroke: "var(--alarm)", "stroke-dasharray": "4 3" },
      s("title", {}, `${restart.process}: ${restart.reason}`)));
  }
  for (const f of [0, 0.5, 1]) {
    const at = first + f * (last - first);
    svg.append(s("text", { x: px(at), y: y + 44, "text-anchor": f === 1 ? "end" : f ? "middle" : "start" },
      page.clock ? new Date(1000 * at).toLocaleTimeString("sv") : seconds(at)));
  }
  return drawing(`The last ${steps.length} steps`, svg, () => [["step", "ended", "wait", "update", "publish", "generators idle", "generators' version", "episodes"],
    ...page.steps.map((r) => [r.step, r.ended, r.wait, r.update, r.publish, r.generators.idle, r.generators.version, r.actors.episodes])],
    h("div", { class: "keys-of" }, first > begun ? h("span", {}, `The first ${seconds(first - begun)}, before the first batch, are cut off.`) : null, LEARNER.map(([, title, paint]) => h("span", {}, swatch(paint), title)), h("span", {}, swatch("sample"),
      names.length ? "generator: shade by version; in gaps none of its segments arrived" : "generators: height is the busy share, shade the version"), h("span", {}, swatch("tool"), "episodes under way")));
}

const TURN = [["waited", "waits for an engine", "wait"], ["sampled", "samples", "sample"], ["tools", "in tools and environment", "tool"]];

/** One batch: a bar per trajectory, the last arrivals first, so that the long tail is named. */
function anatomy(main, batch, given, go) {
  const steps = batch.steps;
  const at = steps.indexOf(batch.step);
  main.append(h("h2", { id: "batch" }, `The batch of step ${batch.step}: what did it wait for?`),
    h("div", { class: "bar" },
      h("label", {}, "step", h("select", { id: "step", onchange: (e) => go({ step: e.target.value }) },
        steps.map((n) => h("option", { value: n, selected: n === batch.step }, n)))),
      h("button", { type: "button", id: "previous", disabled: at < 1, onclick: () => go({ step: steps[at - 1] }) }, "previous (k)"),
      h("button", { type: "button", id: "next", disabled: at < 0 || at >= steps.length - 1, onclick: () => go({ step: steps[at + 1] }) }, "next (j)"),
      h("span", {}, `${batch.bars.length} trajectories, trained against version ${num(batch.trained_version)}; waiting ${percent(batch.share_waiting)}, tools ${percent(batch.share_tools)} of their time`)));
  const bars = batch.bars.slice(0, 150);
  if (!batch.clock) {
    main.append(h("p", { class: "soft" }, "— this journal has no times of arrival, so bars cannot be placed on the wall clock; runs of this version have them"));
    main.append(table("trajectories of the batch", [["trajectory", (b) => link(b, given)], ["tokens", (b) => num(b.length)],
      ["versions", (b) => b.versions?.join("–") ?? "—"], ["lag", (b) => num(b.lag)], ["seconds", (b) => seconds(b.seconds)]], bars));
    return;
  }
  const [width, left] = [1100, 150];
  const ends = bars.flatMap((b) => [b.began, b.ended]).concat(batch.taken ?? []).filter((t) => t !== null);
  const [first, last] = [Math.min(...ends), Math.max(...ends)];
  const px = (t) => left + (width - left - 10) * (t - first) / Math.max(1e-9, last - first);
  const svg = s("svg", { viewBox: `0 0 ${width} ${bars.length * 13 + 34}` });
  bars.forEach((b, i) => {
    const y = i * 13 + 4;
    const group = s("a", { href: address("trajectory", { run: given.run, id: b.trajectory }),
      "aria-label": `${b.trajectory}: ${seconds(b.seconds)}, ${b.length} tokens` });
    group.append(s("text", { x: left - 6, y: y + 9, "text-anchor": "end" }, b.trajectory.slice(0, 22)));
    let t = b.began;
    if (b.turns.length) {
      for (const turn of b.turns) {
        for (const [name, title, paint] of TURN) {
          if (!turn[name]) continue;
          const shade = name === "sampled" ? { "fill-opacity": 0.45 + 0.5 * (((b.versions?.[1] ?? 0) % 4) / 4) } : {};
          group.append(s("rect", { x: px(t), y, width: Math.max(0.5, px(t + turn[name]) - px(t)), height: 10, ...painted(paint), ...shade },
            s("title", {}, `${b.trajectory}, turn ${turn.turn}: ${title} ${seconds(turn[name])}; versions ${b.versions?.join("–") ?? "—"}`)));
          t += turn[name];
        }
      }
    } else {
      group.append(s("rect", { x: px(b.began), y, width: Math.max(1, px(b.ended) - px(b.began)), height: 10, fill: "var(--c6)" },
        s("title", {}, `${b.trajectory}: from the first to the last segment's arrival`)));
    }
    if (b.delivered !== null) group.append(s("circle", { cx: px(Math.min(last, Math.max(first, b.delivered))), cy: y + 5, r: 2.5, fill: "var(--front)" }, s("title", {}, `delivered to the learner ${clock(b.delivered)}`)));
    svg.append(group);
  });
  if (batch.taken !== null) svg.append(s("line", { x1: px(batch.taken), x2: px(batch.taken), y1: 0, y2: bars.length * 13 + 6, stroke: "var(--alarm)", "stroke-dasharray": "4 3" }, s("title", {}, `committed ${clock(batch.taken)}`)));
  for (const f of [0, 0.5, 1]) svg.append(s("text", { x: px(first + f * (last - first)), y: bars.length * 13 + 28, "text-anchor": f === 1 ? "end" : f ? "middle" : "start" },
    new Date(1000 * (first + f * (last - first))).toLocaleTimeString("sv")));
  main.append(drawing(`Trajectories of step ${batch.step}, the last arrivals first`, svg,
    () => [["trajectory", "began", "ended", "delivered", "waited", "sampled", "tools"], ...batch.bars.map((b) => [b.trajectory, b.began, b.ended, b.delivered,
      ...TURN.map(([name]) => (b.turns.length ? b.turns.reduce((sum, turn) => sum + turn[name], 0) : null))])],
    h("div", { class: "keys-of" }, TURN.map(([, title, paint]) => h("span", {}, swatch(paint), title)), h("span", {}, "● delivered to the learner"), h("span", {}, "┊ committed"),
      batch.left_out ? h("span", {}, `${batch.left_out} further ones are left out`) : null)));
}

const link = (b, given) => h("a", { href: address("trajectory", { run: given.run, id: b.trajectory }) }, b.trajectory);
