// Relative position on a line: a rule, waves that make f(Δ), where they come from, content that chooses among them, v learned.

import { human } from "./colour.js";
import { fill, h } from "./dom.js";
import { curve } from "./lesson_curve.js";
import { button, check, choice, fixed, heat, numbers, slider } from "./lesson_parts.js";

const NAMES = ["cos ω0Δ", "sin ω0Δ", "cos ω1Δ", "sin ω1Δ"];
const least = (rows) => Math.min(...rows.flat());
const most = (rows) => Math.max(...rows.flat());
const texts = (rows, digits) => rows.map((row) => row.map((x) => fixed(x, digits)));

export function start(stage) {
  const { inputs, bounds, answer: begun } = stage;
  const replaced = (list, n, x) => list.map((old, m) => (m === n ? x : old));

  // A rule
  const delta = slider({ label: stage.say("delta"), value: inputs.delta, bounds: bounds.delta, id: "delta", set: (x) => stage.set({ delta: x }) });
  const says = h("p", { id: "rule-says" });
  const side = { rows: begun.tokens, columns: begun.tokens };
  const rules = {
    score: heat({ cells: begun.rule.score, title: stage.say("score"), id: "score", ...side }),
    soft: heat({ cells: begun.rule.soft, title: stage.say("soft"), id: "soft", ...side }),
    hard: heat({ cells: begun.rule.hard, title: stage.say("hard"), id: "hard", ...side }),
  };
  const profile = curve({ title: stage.say("profile"), series: [{ name: "", values: begun.rule.profile }], labels: begun.profile_deltas, id: "rule-profile", text: (x) => human(x) });
  const toeplitz = h("p", { className: "faint number", id: "toeplitz" });

  // Waves
  const periods = inputs.periods.map((x, n) => slider({ label: "", value: x, bounds: bounds.periods, id: `period-${n}`, set: (y) => stage.set({ periods: replaced(stage.inputs.periods, n, y) }) }));
  const readout = inputs.v.map((x, n) => slider({ label: stage.say("v", { name: NAMES[n] }), value: x, bounds: bounds.v, id: `v-${n}`, text: (y) => fixed(y, 1), set: (y) => stage.set({ v: replaced(stage.inputs.v, n, y) }) }));
  const f = curve({ title: stage.say("curve"), series: [{ name: "f", values: begun.curve }], labels: begun.far.map(String), mark: begun.far.indexOf(0), id: "f" });
  const R = numbers({ title: stage.say("R"), values: begun.R.map((row, n) => [...row, begun.f[n]]), rows: begun.deltas.map(String), columns: [...NAMES, "f(Δ)"], id: "R", shape: `${begun.R.length} x ${begun.R[0].length}` });
  const places = { rows: begun.places, columns: begun.places };
  const F = heat({ cells: begun.F, title: stage.say("F"), id: "F", ...places, point: (i, j) => {
    F.mark((a, b) => a - b === i - j);
    told.textContent = stage.say("F_pair", { q: i, k: j, delta: i - j, value: fixed(stage.answer.F[i][j], 3) });
  } }); // prettier-ignore
  const told = h("p", { className: "faint number", id: "F-pair" }, stage.say("F_note"));

  // Four parts
  const names = Object.keys(begun.parts);
  const title = (name) => stage.say(`of_${name.replace("-", "_")}`);
  const parts = Object.fromEntries(names.map((name) => [name, heat({ cells: begun.parts[name], title: title(name), id: `part-${name}`, ...places, point: (i, j) => pointParts(i, j) })]));
  const partsTold = h("p", { className: "number", id: "parts-pair" });
  const pointParts = (i, j) => {
    for (const each of Object.values(parts)) each.mark((a, b) => a === i && b === j);
    const values = names.map((name) => stage.answer.parts[name][i][j]);
    partsTold.textContent = stage.say("parts_pair", { q: i, k: j, parts: values.slice(0, -1).map((x) => fixed(x, 2)).join(" + "), sum: fixed(values.at(-1), 2) });
  };

  // Content
  const whose = choice({ label: stage.say("side"), value: inputs.side, options: bounds.side.map((x) => [x, stage.say(`side_${x}`)]), id: "side", set: (x) => stage.set({ side: x }) });
  const quiet = inputs.low.map((x, n) => check({ label: stage.say("low", { n }), value: x, id: `low-${n}`, set: (y) => stage.set({ low: replaced(stage.inputs.low, n, y) }) }));
  const weight = numbers({ title: stage.say("weight"), values: inputs.weight, bounds: bounds.weight, digits: 1, id: "weight", set: (i, j, x) => stage.set({ weight: stage.inputs.weight.map((row, n) => (n === i ? replaced(row, j, x) : row)) }) });
  const contentTitle = h("figcaption");
  const content = heat({ cells: begun.content, id: "content", ...places });
  const contentNote = h("p", { className: "faint", id: "content-note" });

  // Learning
  const learning = h("p", { className: "number", id: "learned", "aria-live": "off" });
  const bar = h("progress", { max: begun.steps, value: 0, id: "learning" });
  const found = curve({ title: stage.say("curve"), series: [{ name: stage.say("true"), values: begun.curve, colour: "key" }, { name: stage.say("now"), values: begun.curve.map(() => 0), colour: "accent" }], labels: begun.far.map(String), id: "found" });
  const vectors = numbers({ title: "v", values: [inputs.v, inputs.v.map(() => 0)], rows: [stage.say("true"), stage.say("now")], columns: NAMES, digits: 3, id: "vectors" });
  const stopping = button(stage.say("stop"), () => stage.cancel?.abort(), { id: "stop", disabled: true });
  const learn = button(stage.say("learn_start"), async () => {
    [learn.disabled, stopping.disabled] = [true, false];
    const { v, periods: given } = stage.inputs;
    const bottom = Math.min(-1, ...stage.answer.curve);
    const top = Math.max(1, ...stage.answer.curve);
    await stage.stream({ v, periods: given }, (state) => {
      bar.max = state.steps;
      bar.value = state.step;
      learning.dataset.value = state.loss;
      learning.textContent = stage.say("learned", { step: state.step, steps: state.steps, loss: human(state.loss) });
      found.update({ series: [{ name: stage.say("true"), values: state.true, colour: "key" }, { name: stage.say("now"), values: state.curve, colour: "accent" }], low: bottom, high: top });
      vectors.update([v, state.v]);
    });
    [learn.disabled, stopping.disabled] = [false, true];
    stage.tell(learning.textContent);
  }, { id: "learn", className: "main" }); // prettier-ignore

  fill(
    stage.element,
    h("h4", {}, stage.say("rule")), delta.element, says,
    h("div", { className: "beside" }, Object.values(rules).map((each) => each.element)),
    h("div", { className: "beside" }, profile.element, toeplitz),
    h("h4", {}, stage.say("waves")),
    h("div", { className: "beside" }, h("div", {}, periods.map((each) => each.element), readout.map((each) => each.element)), f.element),
    h("div", { className: "beside" }, R.element, h("div", {}, F.element, told)),
    h("h4", {}, stage.say("parts")), h("p", { className: "faint" }, stage.say("parts_note")),
    h("div", { className: "beside" }, Object.values(parts).map((each) => h("div", { className: "fit" }, each.element))), partsTold,
    h("h4", {}, stage.say("content")), whose.element, h("div", {}, quiet.map((each) => each.element)),
    h("div", { className: "beside" }, weight.element, h("figure", {}, contentTitle, content.element)), contentNote,
    h("h4", {}, stage.say("learn")), h("p", { className: "faint" }, stage.say("learn_note", { count: begun.learned_on })),
    h("div", { className: "buttons" }, learn, stopping), bar, learning,
    h("div", { className: "beside" }, found.element, vectors.element),
  ); // prettier-ignore

  return (answer) => {
    const now = stage.inputs;
    delta.update(now.delta);
    const shift = -answer.inputs.delta;
    const listed = (pairs) => pairs.map(([i, j]) => `(${i},${j})`).join(" ") || stage.say("none");
    says.textContent = stage.say("says", { sign: shift < 0 ? "−" : "+", size: Math.abs(shift), pairs: listed(answer.pairs), empty: answer.empty.join(", ") || stage.say("none") });
    const { rule } = answer;
    rules.score.update({ cells: rule.score, texts: rule.score.map((row) => row.map(String)) });
    rules.soft.update({ cells: rule.soft, texts: texts(rule.soft, 4) });
    rules.hard.update({ cells: rule.hard, visible: rule.visible, texts: rule.hard.map((row, i) => row.map((x, j) => (rule.visible[i][j] ? human(x) : "·"))) });
    profile.update({ series: [{ name: "", values: rule.profile }] });
    toeplitz.textContent = stage.say("toeplitz", Object.fromEntries(Object.entries(rule.toeplitz).map(([name, x]) => [name, fixed(x, 2)])));
    periods.forEach((each, n) => {
      each.update(now.periods[n]);
      each.element.querySelector("label").textContent = stage.say("period", { n, omega: fixed(answer.omegas[n], 3) });
    });
    readout.forEach((each, n) => each.update(now.v[n]));
    f.update({ series: [{ name: "f", values: answer.curve }] });
    R.update(answer.R.map((row, n) => [...row, answer.f[n]]));
    F.update({ cells: answer.F, texts: texts(answer.F, 2), low: least(answer.F), high: most(answer.F) });
    const all = Object.values(answer.parts).flat();
    for (const name of names) parts[name].update({ cells: answer.parts[name], texts: texts(answer.parts[name], 1), low: least(all), high: most(all) });
    whose.update(now.side);
    quiet.forEach((each, n) => each.update(now.low[n]));
    weight.update(now.weight);
    contentTitle.textContent = stage.say(answer.inputs.side === "query" ? "content_map" : "content_key_map");
    content.update({ cells: answer.content, texts: texts(answer.content, 2), low: least(answer.content), high: most(answer.content) });
    contentNote.textContent = stage.say("content_note", { content: human(answer.content_spread), F: human(answer.F_spread) });
    const zero = answer.deltas.indexOf(0);
    stage.tell(stage.say("told", { f: answer.f.slice(zero).map((x) => fixed(x, 2)).join(", ") }));
  };
}
