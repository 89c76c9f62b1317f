// What became of every token?

import { h, s, num, table } from "./dom.js";
import { ask, address } from "./data.js";
import { areas, bars, drawing } from "./charts.js";

export async function render(main, given) {
  const page = await ask("ledger", { run: given.run });
  main.append(h("h1", {}, "What became of every token?"));
  if (page.sum) {
    const parts = Object.entries(page.sum.outcomes).filter(([, n]) => n).map(([name, n]) => `${num(n)} ${name}`);
    main.append(h("p", { class: "sentence", id: "sum" },
      `${page.sum.difference === 0 ? "The ledger closes" : "▲ The ledger does not close"}: ${num(page.sum.stored)} tokens journaled = `,
      [`${num(page.sum.held)} held`, ...parts].join(" + "), page.sum.difference ? `, and ${num(page.sum.difference)} too many.` : "."));
  } else {
    main.append(h("p", { class: "error" }, "— the journal does not say what became of its tokens: it is missing, damaged, or not read yet"));
  }
  const flow = page.flow;
  const outcomes = Object.entries(flow.outcomes).filter(([, n]) => n).sort((a, b) => b[1] - a[1]);
  if (flow.journaled) main.append(sankey(flow, outcomes, given, page.bound));
  main.append(
    h("p", { class: "facts" }, fact("trained again from the replay buffer", page.replayed), fact("came back because a step was undone", page.rolled_back),
      fact("delivered again", page.redelivered)),
    table("outcomes", [["outcome", ([name]) => link(name, given, page.bound)], ["sampled tokens", ([, n]) => num(n)],
      ["share of the journaled ones", ([, n]) => `${num(100 * n / flow.journaled, 3)} %`],
      ["all tokens", ([name]) => num(page.of_rows[name]?.tokens)], ["segments", ([name]) => num(page.of_rows[name]?.segments)],
      ["meaning", ([name]) => page.meanings[name] || meaning(name)]], outcomes));
  const series = page.series;
  const parts = Object.keys(series).filter((name) => name !== "step").map((name) => ({ label: name, y: series[name] }));
  if (parts.length) main.append(h("h2", {}, "Over the steps"), areas("Tokens by outcome, as the learner's metrics have them", series.step, parts));
  main.append(h("h2", {}, "Are long answers lost?"));
  const { edges, all, trained } = page.lengths;
  if (edges.length) {
    main.append(bars("Lengths of finished training trajectories (action tokens)", edges.slice(0, -1).map((e) => num(e)),
      [{ label: "all", counts: all }, { label: "trained", counts: trained }], {
        names: edges.slice(0, -1).map((e, i) => `${num(e)} to below ${num(edges[i + 1])}`),
        link: (i) => address("table", { run: given.run, purpose: "train", length_min: edges[i], length_max: Math.ceil(edges[i + 1]) - 1 }) }),
    h("p", {}, `Mean of all ${num(page.lengths.mean_all)}, of the trained ${num(page.lengths.mean_trained)}; distance of the two distributions ${num(page.distance)} tokens, bias ${num(page.bias)} tokens.`));
  } else main.append(h("p", { class: "soft" }, "— no training trajectory has ended"));
}

const fact = (name, n) => h("span", {}, h("b", {}, `${name} `), num(n));
const plain = (name) => name.replace(/^(trained:|dropped:|held) .*/, (_, word) => word.replace(":", ""));

function given_(name, bound) {
  if (name === "dropped: evaluated") return { outcome: "dropped", purpose: "eval" };
  if (name === "dropped: equal returns in its group") return { outcome: "dropped", purpose: "train", uniform: "true" };
  if (name.endsWith("by the learner")) return { outcome: "dropped", purpose: "train", uniform: "false" };
  if (name === "dropped: failed") return { outcome: "dropped", status: "failed" };
  if (name.startsWith("trained: masked")) return { outcome: "trained", lag_min: bound === null ? null : bound + 1, sort: "-lag" };
  return { outcome: plain(name) };
}

const link = (name, given, bound) => h("a", { href: address("table", { run: given.run, ...given_(name, bound) }) }, name);

function meaning(name) {
  if (name.startsWith("trained: masked")) return "tokens of trained trajectories that were older than the lag bound, so that they carried no gradient";
  if (name === "dropped: stale, by the learner") return "all of the trajectory was older than the lag bound, so the learner trained none of it";
  if (name === "dropped: equal returns in its group") return "no member of the group did better than another, so there is no gradient";
  if (name.startsWith("trained")) return "tokens that entered a gradient";
  if (name === "dropped: evaluated") return "answers to held-out tasks";
  return "tokens that the learner filtered out";
}

/**
 * Splits outcomes by whether the learner had got the tokens. Those that it trained or dropped it had; of the held ones it has
 * what was delivered beyond them. Returns null if that does not add up, as with a journal whose files are deleted.
 */
function byDelivery(flow, outcomes) {
  const got = outcomes.filter(([name]) => /^(trained|dropped)/.test(name));
  const held = outcomes.find(([name]) => name === "held")?.[1] ?? 0;
  const has = flow.delivered - got.reduce((sum, [, n]) => sum + n, 0);
  if (flow.delivered === null || has < 0 || has > held) return null;
  const rest = outcomes.filter(([name]) => !/^(trained|dropped|held$)/.test(name));
  const some = (list) => list.filter(([, n]) => n);
  return [some([...got, ["held by the learner", has]]), some([...rest, ["held before it", held - has]])];
}

/** Sampled, journaled, delivered and outcomes as bands whose heights are tokens; a band opens its trajectories. */
function sankey(flow, outcomes, given, bound) {
  const [width, tall, wide] = [980, 300, 16];
  const [atJournal, atLearner, atEnd, top] = [230, 450, 700, 26];
  const sampled = flow.sampled === null ? flow.journaled : Math.max(flow.sampled, flow.journaled);
  const split = byDelivery(flow, outcomes);
  const bands = split ? split.flat() : outcomes;
  const scale = (tall - 8 * bands.length) / sampled;
  const svg = s("svg");
  const column = (x, y, n, title) => svg.append(s("rect", { x, y, width: wide, height: Math.max(1, n * scale), fill: "var(--c6)" }, s("title", {}, title)));
  const ribbon = (x1, y1, x2, y2, n, paint, title, href) => {
    const t = Math.max(1, n * scale);
    const m = (x1 + x2) / 2;
    const path = s("path", { d: `M${x1},${y1}C${m},${y1} ${m},${y2} ${x2},${y2}V${y2 + t}C${m},${y2 + t} ${m},${y1 + t} ${x1},${y1 + t}Z`,
      fill: `var(--${paint})`, "fill-opacity": 0.55 }, s("title", {}, title));
    svg.append(href ? s("a", { href, "aria-label": title, class: "link" }, path) : path);
  };
  const label = (x, y, line) => svg.append(s("text", { x, y }, line));
  const old = flow.sampled !== null && flow.sampled < flow.journaled;
  label(4, 14, `sampled ${old ? "—" : num(flow.sampled)}`);
  label(atJournal, 14, `journaled ${num(flow.journaled)}`);
  label(atEnd, 14, "outcome");
  column(4, top, sampled, "sampled tokens, as generators count them");
  column(atJournal, top, flow.journaled, "tokens in the journal");
  ribbon(4 + wide, top, atJournal, top, flow.journaled, "c0", `${num(flow.journaled)} sampled tokens reached the journal`);
  if (flow.not_journaled) {
    const y = top + flow.journaled * scale;
    ribbon(4 + wide, y, 190, y + 12, flow.not_journaled, "c1", `${num(flow.not_journaled)} sampled and not journaled: under way, cancelled, or lost with a process`);
    label(80, Math.min(tall + 40, y + flow.not_journaled * scale + 26), `${num(flow.not_journaled)} not journaled`);
  }
  if (split && flow.delivered) {
    label(atLearner, 14, `delivered ${num(flow.delivered)}`);
    column(atLearner, top, flow.delivered, "tokens that the learner got");
    ribbon(atJournal + wide, top, atLearner, top, flow.delivered, "c0", `${num(flow.delivered)} sampled tokens were delivered to the learner`);
  }
  let from = top;
  let to = top;
  bands.forEach(([name, n], i) => {
    const begin = (split && i < split[0].length ? atLearner : atJournal) + wide;
    ribbon(begin, from, atEnd, to, n, `c${i % 8}`, `${name}: ${num(n)} tokens`, address("table", { run: given.run, ...given_(name, bound) }));
    column(atEnd, to, n, name);
    label(atEnd + 22, to + Math.max(9, n * scale / 2 + 4), `${name} ${num(n)}`);
    from += n * scale;
    to += Math.max(16, n * scale + 8);
  });
  svg.setAttribute("viewBox", `0 0 ${width} ${Math.max(tall + 50, to + 10)}`);
  return drawing("The flow of sampled tokens", svg, () => [["outcome", "sampled tokens"], ["sampled", flow.sampled], ["journaled", flow.journaled],
    ["delivered", flow.delivered], ...outcomes], h("p", { class: "soft" }, "Heights are tokens. A click on a band opens its trajectories. "
      + `${num(flow.delivered)} were delivered to the learner.${old ? " The generators’ own count of sampled tokens is behind the journal." : ""}`));
}
