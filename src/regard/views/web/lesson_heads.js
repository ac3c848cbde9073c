// Heads side by side and put together again; who looks at whom; and how far a signal goes in an RNN and in attention.

import { human } from "./colour.js";
import { fill, h } from "./dom.js";
import { curve } from "./lesson_curve.js";
import { entry } from "./lesson_more.js";
import { choice, figure, fixed, heat, shares, slider } from "./lesson_parts.js";

export function start(stage) {
  const { inputs, bounds } = stage;
  const say = (key, numbers) => stage.say(key, numbers);
  const texts = (rows) => rows.map((row) => row.map((x) => fixed(x, 2)));
  let row = 0;

  const heads = choice({ label: stage.say("heads"), value: inputs.heads, options: bounds.heads.map((n) => [n, String(n)]), id: "heads", set: (n) => stage.set({ heads: n }) });
  const maps = h("div", { className: "beside", id: "head-maps" });
  const [concat, mixed] = [shares({ values: [], labels: [] }), shares({ values: [], labels: [] })];
  const [concatTitle, mixedTitle] = [h("figcaption"), h("figcaption")];
  const blockTitle = h("figcaption");
  const dims = stage.answer.mixed[0].map((_, n) => String(n + 1));
  const block = heat({ cells: stage.answer.block.map((each) => each.rows[0]), rows: stage.answer.block.map((each) => stage.say(`stage_${each.name}`)), columns: dims, id: "block" });
  const shapes = h("p", { className: "faint number", id: "shapes" });
  let held = [];
  const drawMaps = (answer) => {
    if (held.length !== answer.weights.length) {
      const title = (n) => stage.say("head", { n: n + 1 });
      held = answer.weights.map((cells, n) => heat({ cells, texts: texts(cells), rows: answer.tokens, columns: answer.tokens, title: title(n), point: (i) => ((row = i), drawRow(stage.answer)), id: `head-${n}` }));
      fill(maps, held.map((each) => each.element));
    }
    held.forEach((each, n) => each.update({ cells: answer.weights[n], texts: texts(answer.weights[n]) }));
  };
  const drawRow = (answer) => {
    const token = answer.tokens[row];
    held.forEach((each) => each.mark((i) => i === row));
    concatTitle.textContent = stage.say("concat", { token });
    mixedTitle.textContent = stage.say("mixed", { token });
    concat.update({ values: answer.concat[row], labels: answer.concat[row].map((_, n) => stage.say("part", { n: Math.floor(n / answer.v_dim) + 1 })), texts: answer.concat[row].map((x) => fixed(x, 2)) });
    const through = answer.block.map((each) => each.rows[row]);
    const size = Math.max(...through.flat().map(Math.abs));
    blockTitle.textContent = stage.say("block", { token, shape: answer.block.at(-1).shape });
    block.update({ cells: through, texts: through.map((each) => each.map((x) => fixed(x, 2))), low: -size, high: size });
    mixed.update({ values: answer.mixed[row], labels: answer.mixed[row].map((_, n) => `y${n + 1}`), texts: answer.mixed[row].map((x) => fixed(x, 2)) });
  };

  const [asking, asked] = ["asking", "asked"].map((name) => entry({ label: say(name), value: inputs[name], id: name, most: 40, set: (text) => stage.set({ [name]: text }) }));
  const pair = h("p", { id: "pair", className: "number", "aria-live": "polite" }, stage.say("point"));
  const kinds = {};
  const titles = { self: h("figcaption"), cross: h("figcaption") };
  const point = (name) => (i, j) => {
    const { kinds: found, rows } = stage.answer;
    const { columns, logits, weights, shape, output } = found[name];
    for (const each of Object.keys(kinds)) kinds[each].mark((a, b) => each === name && a === i && b === j);
    pair.dataset.value = weights[i][j];
    pair.textContent = stage.say("pair", { q: rows[i], k: columns[j], logit: fixed(logits[i][j]), weight: fixed(weights[i][j]), shape, output });
  };
  for (const name of ["self", "cross"]) {
    const { columns, weights } = stage.answer.kinds[name];
    kinds[name] = heat({ cells: weights, rows: stage.answer.rows, columns, point: point(name), id: name });
  }

  const distance = slider({ label: stage.say("distance"), value: inputs.distance, bounds: bounds.distance, id: "distance", set: (x) => stage.set({ distance: x }) });
  const radius = slider({ label: stage.say("radius"), value: inputs.radius, bounds: bounds.radius, id: "radius", set: (x) => stage.set({ radius: x }) });
  const lines = (answer) => [{ name: say("of_rnn"), values: answer.rnn, colour: "delta" }, { name: say("of_attention"), values: answer.attention, colour: "accent" }];
  const places = stage.answer.rnn.map((_, n) => String(n + 1));
  const fading = curve({ title: stage.say("curve"), series: lines(stage.answer), labels: places, text: (x) => fixed(x, 1), choose: (n) => stage.set({ distance: n + 1 }), id: "fading" });
  const figures = {
    rnn: figure(say("of_rnn"), { id: "rnn" }), attention: figure(say("of_attention"), { id: "attention" }),
    rnn_steps: figure(`${say("steps")}: ${say("of_rnn")}`, { id: "rnn-steps" }), attention_steps: figure(`${say("steps")}: ${say("of_attention")}`, { id: "attention-steps" }),
  }; // prettier-ignore
  const verdict = h("p", { id: "verdict" });
  fill(
    stage.element,
    heads.element,
    h("p", { className: "faint" }, stage.say("each")),
    maps,
    h("div", { className: "beside" }, h("figure", {}, concatTitle, concat.element), h("figure", {}, mixedTitle, mixed.element)),
    shapes,
    h("figure", {}, blockTitle, block.element),
    h("h4", {}, stage.say("kinds")),
    h("div", { className: "beside" }, asking.element, asked.element),
    h("div", { className: "beside" }, ["self", "cross"].map((name) => h("figure", {}, titles[name], kinds[name].element))),
    pair,
    h("h4", {}, stage.say("why")),
    h("div", { className: "beside" },
      h("div", {}, distance.element, radius.element, h("div", { className: "figures" }, Object.values(figures).map((each) => each.element)), verdict),
      fading.element),
    h("details", {}, h("summary", {}, stage.say("code")), h("pre", { tabIndex: 0 }, h("code", {}, `${stage.answer.code.rnn}\n\n${stage.answer.code.attention}`))),
  ); // prettier-ignore

  return (answer) => {
    const { heads: count, asking: left, asked: right, distance: back, radius: size } = stage.inputs;
    heads.update(count);
    asking.update(left);
    asked.update(right);
    distance.update(back);
    radius.update(size);
    row = Math.min(row, answer.tokens.length - 1);
    drawMaps(answer);
    drawRow(answer);
    shapes.textContent = `${stage.say("shapes")}: ${Object.entries(answer.shapes).map(([name, shape]) => `${name} ${shape}`).join(" · ")}`;
    for (const [name, each] of Object.entries(answer.kinds)) kinds[name].update({ cells: each.weights, texts: each.weights.map((cells) => cells.map((x) => fixed(x, 2))), rows: answer.rows, columns: each.columns });
    titles.self.textContent = stage.say("self", { text: answer.inputs.asking });
    titles.cross.textContent = stage.say("cross", { text: answer.inputs.asking, other: answer.inputs.asked });
    fading.update({ series: lines(answer), mark: back - 1 });
    const { far } = answer;
    for (const name of ["rnn", "attention"]) figures[name].update(far[name], human(far[name]), stage.say("share", { share: human(far[`${name}_share`]) }));
    for (const name of ["rnn_steps", "attention_steps"]) figures[name].update(far[name]);
    verdict.textContent = stage.say(`says_${far.verdict}`, { steps: far.rnn_steps, share: human(far.rnn_share) });
    stage.tell(stage.say("told", { distance: back, rnn: human(far.rnn), attention: human(far.attention) }));
  };
}
