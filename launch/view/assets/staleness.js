// How stale is what it trains on?

import { h, num, percent, table } from "./dom.js";
import { ask, address } from "./data.js";
import { bars, curves } from "./charts.js";

export async function render(main, given) {
  const page = await ask("staleness", { run: given.run });
  const lags = page.lags;
  main.append(h("h1", {}, "How stale is it?"), verdict(page));
  if (lags.length) {
    const labels = lags.map((one) => String(one.lag));
    const place = page.bound === null ? -1 : lags.filter((one) => one.lag <= page.bound).length;
    const marks = page.bound === null ? [] : [{ at: place, label: `bound ${page.bound}` }];
    const link = (i) => address("table", { run: given.run, outcome: "trained", lag_min: lags[i].lag, sort: "-lag" });
    const colours = lags.map((one) => (one.beyond ? "c1" : "c0"));
    const figure = (title, name, unit) => bars(title, labels, [{ counts: lags.map((one) => one[name]), colours }], { marks, link, unit });
    main.append(h("div", { class: "grid" },
      figure("Sampled tokens of trained trajectories, by policy lag", "tokens", "tokens"),
      figure("Mean reward, by lag of the token", "reward"),
      lags.some((one) => one.ratio !== undefined && one.ratio !== null) ? figure("Mean importance ratio, by lag", "ratio") : "",
      lags.some((one) => one.clipped !== undefined && one.clipped !== null) ? figure("Share clipped, by lag", "clipped") : "",
      lags.some((one) => one.weight !== undefined && one.weight !== null) ? figure("Mean correction weight, by lag", "weight") : ""),
    table("lags", [["lag", (one) => num(one.lag)], ["tokens", (one) => num(one.tokens)], ["share", (one) => percent(one.tokens / page.tokens)],
      ["trajectories", (one) => h("a", { href: link(lags.indexOf(one)) }, num(one.trajectories))], ["mean reward", (one) => num(one.reward)],
      ["mean ratio", (one) => num(one.ratio)], ["share clipped", (one) => percent(one.clipped)], ["mean weight", (one) => num(one.weight)],
      ["gradient", (one) => (one.beyond ? "masked: beyond the bound" : "within the bound")]], lags));
  } else main.append(h("p", { class: "soft" }, "— nothing in the journal was trained"));
  const x = page.mean.step;
  main.append(h("h2", {}, "Over the steps"), h("div", { class: "grid" }, curves("Lag of the tokens that carried gradient (versions)",
    [{ label: "mean", x, y: page.mean.mean }, { label: "largest", x, y: page.mean.max }],
    { bound: page.bound ?? undefined, onpoint: (step) => { location.hash = address("table", { run: given.run, step_min: step, step_max: step, sort: "-lag" }); } })));
}

function verdict(page) {
  const bound = page.bound === null ? "—" : page.bound;
  if (page.carried_beyond !== undefined && page.carried_beyond !== null) {
    return h("p", { class: "sentence", id: "verdict" }, `${num(page.carried_beyond)} tokens beyond the bound of ${bound} carried gradient, counted over ${num(page.annotated)} tokens that the learner annotated. `,
      `${num(page.tokens_beyond)} of ${num(page.tokens)} tokens were beyond it, and masked.`);
  }
  const counted = page.steps_beyond === null ? "— the learner reported no lag"
    : `In ${num(page.steps_beyond)} of ${num(page.steps)} steps a token beyond the bound of ${bound} carried gradient; the largest lag that did was ${num(page.largest_with_gradient)}.`;
  return h("p", { class: "sentence", id: "verdict" }, `${counted} ${num(page.tokens_beyond)} of ${num(page.tokens)} sampled tokens of trained trajectories were beyond it, and masked.`);
}
