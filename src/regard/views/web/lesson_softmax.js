// Softmax: scores to drag, their shares beside them; and what √d does to random vectors.

import { human } from "./colour.js";
import { fill, h } from "./dom.js";
import { curve } from "./lesson_curve.js";
import { button, choice, columns, figure, fixed, shares, slider } from "./lesson_parts.js";

export const after = 1; // what is said first

export function start(stage) {
  const { inputs, bounds } = stage;
  const drawn = columns({
    values: inputs.logits, bounds: bounds.logits, label: (n) => stage.say("logit", { n: n + 1 }),
    set: (n, x) => stage.set({ logits: stage.inputs.logits.map((old, m) => (m === n ? x : old)) }),
  }); // prettier-ignore
  const factor = slider({ label: stage.say("factor"), value: inputs.factor, bounds: bounds.factor, id: "factor", set: (x) => stage.set({ factor: x }) });
  const [fewest, most] = bounds.count;
  const more = button(stage.say("more"), () => stage.set({ logits: [...stage.inputs.logits, 0] }), { id: "more" });
  const fewer = button(stage.say("fewer"), () => stage.set({ logits: stage.inputs.logits.slice(0, -1) }), { id: "fewer" });
  const result = shares({ values: [], labels: [] });
  const entropy = figure(stage.say("entropy"), { id: "entropy" });
  const slope = figure(stage.say("slope"), { id: "slope", note: stage.say("slope_note") });
  const dim = choice({ label: stage.say("dim"), value: inputs.dim, options: bounds.dim.map((d) => [d, String(d)]), id: "dim", set: (d) => stage.set({ dim: d }) });
  const roots = h("table", { className: "plain", id: "roots" });
  const dims = stage.answer.curve.map((each) => each.dim);
  const over = (what) => ["raw", "scaled"].map((how) => ({ name: stage.say(how), values: stage.answer.curve.map((each) => each[what][how]), colour: how === "raw" ? "delta" : "accent" }));
  const curves = ["entropy", "gradient"].map((what) =>
    curve({ title: stage.say(`${what}_curve`), series: over(what), labels: dims.map(String), choose: (n) => stage.set({ dim: dims[n] }), id: `${what}-curve` }),
  );
  fill(
    stage.element,
    h("div", { className: "beside" },
      h("figure", {}, h("figcaption", {}, h("b", {}, stage.say("logits")), h("span", { className: "faint" }, ` ${stage.say("logits_hint")}`)), drawn.element, h("div", { className: "buttons" }, more, fewer), factor.element),
      h("figure", { id: "shares" }, h("figcaption", {}, h("b", {}, stage.say("shares"))), result.element, h("div", { className: "figures" }, entropy.element, slope.element))),
    h("h4", {}, stage.say("roots")),
    dim.element,
    h("p", { id: "roots-told", className: "number" }),
    h("div", { className: "wide" }, roots),
    h("div", { className: "beside" }, curves.map((each) => each.element)),
    h("p", { className: "faint", id: "roots-note" }),
  ); // prettier-ignore

  return (answer) => {
    const { logits, factor: by, dim: size } = stage.inputs;
    drawn.update(logits);
    factor.update(by);
    dim.update(size);
    [more.disabled, fewer.disabled] = [logits.length >= most, logits.length <= fewest];
    const { weights, chosen } = answer;
    result.update({ values: weights, labels: weights.map((_, n) => stage.say("share", { n: n + 1 })), high: 1, mark: weights.indexOf(Math.max(...weights)) });
    entropy.update(answer.entropy, fixed(answer.entropy, 3), stage.say("entropy_of", { most: fixed(answer.most, 3) }));
    slope.update(answer.slope, human(answer.slope));
    const row = (how) => h("tr", {}, h("th", { scope: "row" }, stage.say(how)), h("td", { className: "n", data: { value: chosen.entropy[how] } }, fixed(chosen.entropy[how], 3)), h("td", { className: "n", data: { value: chosen.gradient[how] } }, fixed(chosen.gradient[how], 4)));
    fill(
      roots,
      h("thead", {}, h("tr", {}, h("td"), h("th", { scope: "col", className: "n" }, stage.say("entropy")), h("th", { scope: "col", className: "n" }, stage.say("slope")))),
      h("tbody", {}, row("raw"), row("scaled")),
    );
    document.getElementById("roots-told").textContent = `d = ${chosen.dim} · ${stage.say("root")} = ${fixed(chosen.root, 1)} · ${stage.say("spread")}: ${fixed(chosen.spread, 1)}`;
    for (const each of curves) each.update({ mark: dims.indexOf(size) });
    document.getElementById("roots-note").textContent = stage.say("roots_note", { sample: answer.sample });
    stage.tell(stage.say("told", { shares: weights.map((w) => fixed(w)).join(", "), entropy: fixed(answer.entropy, 3) }));
  };
}
