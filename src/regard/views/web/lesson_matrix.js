// The matrix: every step from X to the output, every number of X and W to be changed, and A below, live.

import { human } from "./colour.js";
import { fill, h } from "./dom.js";
import { button, check, choice, figure, fixed, heat, numbers, shares, slider } from "./lesson_parts.js";

export function start(stage) {
  const { inputs, bounds } = stage;
  const tokens = stage.answer.tokens;
  const steps = bounds.step;
  const step = choice({ label: stage.say("step"), value: inputs.step, options: steps.map((name) => [name, stage.say(`step_${name}`)]), id: "step", set: (name) => stage.set({ step: name }) });
  const walk = (by) => () => stage.set({ step: steps[Math.max(0, Math.min(steps.length - 1, steps.indexOf(stage.inputs.step) + by))] });
  const [before, after] = [button(stage.say("before"), walk(-1), { id: "before" }), button(stage.say("after"), walk(1), { id: "after", className: "main" })];
  const says = h("p", { id: "says" });
  const panel = h("div", { id: "panel" });
  const A = heatOf(stage, tokens);
  const direction = directionOf(stage, tokens);
  fill(stage.element, step.element, says, panel, h("div", { className: "buttons" }, before, after), A.element, h("h4", {}, stage.say("direction")), direction.element);

  let [shown, parts] = [null, []];
  return (answer) => {
    const now = stage.inputs;
    step.update(now.step);
    [before.disabled, after.disabled] = [now.step === steps[0], now.step === steps.at(-1)];
    const key = `${now.step}/${now.dim}/${now.v_dim}/${now.tie}/${now.place}`;
    if (shown !== key) {
      shown = key;
      const lines = panels[now.step](stage, tokens);
      parts = lines.flat();
      fill(panel, lines.map((line) => h("div", { className: "beside" }, line.map((part) => part.element))));
    }
    for (const part of parts) part.follow(answer);
    says.textContent = stage.say(`says_${now.step}`, { root: human(answer.root), a: answer.shapes.a, v: answer.shapes.v, y: answer.shapes.y });
    A.update(answer);
    direction.update(answer);
  };
}

// What each step shows: lines of parts with `follow(answer)`

/** A matrix to be changed: its numbers are inputs; only the first columns are used when it is narrower. */
function given(stage, name, title, tokens) {
  const wide = () => ({ w_q: stage.inputs.dim, w_k: stage.inputs.dim, w_v: stage.inputs.v_dim })[name] ?? stage.inputs.x[0].length;
  const values = () => stage.inputs[name].map((row) => row.slice(0, wide()));
  const set = (i, j, x) => stage.set({ [name]: stage.inputs[name].map((row, n) => row.map((old, m) => (n === i && m === j ? x : old))) });
  const part = numbers({ title, values: values(), rows: tokens, bounds: stage.bounds.number, digits: 1, set, shape: stage.answer.shapes[name], id: name });
  return { ...part, follow: () => part.update(values()) };
}

/** A matrix that was computed. */
function made(stage, name, title, tokens, of = name) {
  const part = numbers({ title, values: stage.answer[of], rows: tokens, shape: stage.answer.shapes[name] ?? stage.answer.shapes.a, id: `made-${of}` });
  return { ...part, follow: (answer) => part.update(answer[of]) };
}

/** Pairs that were computed: rows are queries, columns are keys. */
function pairs(stage, of, title, tokens) {
  const part = numbers({ title, values: stage.answer[of], rows: tokens, columns: tokens, shape: stage.answer.shapes.a, id: `made-${of}` });
  return { ...part, follow: (answer) => part.update(answer[of]) };
}

const control = (part, read) => ({ element: part.element, follow: () => part.update(read()) });

const panels = {
  x: (stage, tokens) => [
    [given(stage, "x", stage.inputs.place ? "E" : "X = E", tokens), ...(stage.inputs.place ? [made(stage, "x", "P", tokens, "where"), made(stage, "x", "X = E + P", tokens, "made")] : [])],
    [control(check({ label: stage.say("place"), value: stage.inputs.place, id: "place", set: (on) => stage.set({ place: on }) }), () => stage.inputs.place)],
  ],
  qkv: (stage, tokens) => {
    const sizes = ["dim", "v_dim"].map((name) => control(slider({ label: stage.say(name), value: stage.inputs[name], bounds: stage.bounds[name], id: name, set: (x) => stage.set({ [name]: x }) }), () => stage.inputs[name]));
    const wk = stage.inputs.tie === "free" ? given(stage, "w_k", "W_K") : made(stage, "w_k", "W_K");
    return [
      sizes,
      [given(stage, "w_q", "W_Q"), wk, given(stage, "w_v", "W_V")],
      [made(stage, "q", "Q = X W_Q", tokens), made(stage, "k", "K = X W_K", tokens), made(stage, "v", "V = X W_V", tokens)],
    ];
  },
  scores: (stage, tokens) => [[made(stage, "q", "Q", tokens), made(stage, "k", "K", tokens), pairs(stage, "scores", "Q Kᵀ", tokens)]],
  scale: (stage, tokens) => [
    [control(check({ label: stage.say("scaled"), value: stage.inputs.scaled, id: "scaled", set: (x) => stage.set({ scaled: x }) }), () => stage.inputs.scaled)],
    [pairs(stage, "scores", "Q Kᵀ", tokens), pairs(stage, "divided", "Q Kᵀ ÷ √d_k", tokens)],
  ],
  position: (stage, tokens) => [
    [control(check({ label: stage.say("position"), value: stage.inputs.position, id: "position", set: (x) => stage.set({ position: x }) }), () => stage.inputs.position)],
    [control(slider({ label: stage.say("slope"), value: stage.inputs.slope, bounds: stage.bounds.slope, id: "slope", set: (x) => stage.set({ slope: x }) }), () => stage.inputs.slope)],
    [pairs(stage, "divided", "Q Kᵀ ÷ √d_k", tokens), pairs(stage, "term", stage.say("term"), tokens), pairs(stage, "logits", stage.say("logit"), tokens)],
  ],
  mask: (stage, tokens) => [
    [control(choice({ label: stage.say("mask"), value: stage.inputs.mask, options: stage.bounds.mask.map((name) => [name, stage.say(`mask_${name}`)]), id: "mask", set: (x) => stage.set({ mask: x }) }), () => stage.inputs.mask)],
    [pairs(stage, "logits", stage.say("logit"), tokens), pairs(stage, "masked", stage.say("mask"), tokens)],
  ],
  softmax: (stage, tokens) => [[pairs(stage, "masked", stage.say("logit"), tokens), pairs(stage, "weights", "A", tokens)]],
  output: (stage, tokens) => [[pairs(stage, "weights", "A", tokens), made(stage, "v", "V", tokens), made(stage, "y", "Y = A V", tokens)]],
}; // prettier-ignore

/** A as a picture, and beside it the pair that is pointed at: where its weight comes from. */
function heatOf(stage, tokens) {
  const about = h("div", { id: "pair" });
  const turned = check({ label: stage.say("turned"), value: stage.inputs.turned, id: "turned", set: (x) => stage.set({ turned: x }) });
  const caption = h("b");
  const flip = (rows) => rows[0].map((_, j) => rows.map((row) => row[j]));
  const way = (rows) => (stage.inputs.turned ? flip(rows) : rows);
  const row = shares({ values: [], labels: [] });
  let pair = [1, 0]; // until the reader points at another
  const tell = (i, j) => {
    pair = stage.inputs.turned ? [j, i] : [i, j];
    part.mark((a, b) => (stage.inputs.turned ? b === pair[0] : a === pair[0]));
    explain(stage.answer);
  };
  const explain = (answer) => {
    const [i, j] = pair;
    const [q, k] = [tokens[i], tokens[j]];
    const products = answer.products[i][j].map((x) => (x < 0 ? `(${fixed(x, 2)})` : fixed(x, 2))).join(" + ");
    const seen = answer.visible[i][j];
    const line = (text, x, name) => h("tr", {}, h("td", {}, text), h("td", { className: "n", id: name, data: { value: x } }, x === null ? "−∞" : fixed(x, 4)));
    row.update({ values: answer.weights[i], labels: tokens, high: 1, mark: j });
    fill(
      about,
      h("p", {}, h("span", { className: "q" }, stage.say("pair_title", { q, k }))),
      h("p", { className: "number" }, stage.say("products", { products, score: fixed(answer.scores[i][j], 4) })),
      h("table", { className: "plain" }, h("tbody", {}, line(stage.say("divided"), answer.divided[i][j], "pair-divided"), line(stage.say("term"), answer.term[i][j], "pair-term"), line(stage.say("logit"), answer.masked[i][j], "pair-logit"), line(stage.say("lse"), answer.lse[i], "pair-lse"), line(stage.say("weight"), answer.weights[i][j], "pair-weight"))),
      seen ? null : h("p", { className: "faint" }, stage.say("hidden")),
      h("p", { className: "faint" }, stage.say("row", { q })),
      row.element,
      h("p", { className: "faint" }, stage.say("sum", { row: fixed(answer.sums.rows[i], 4), k, column: fixed(answer.sums.columns[j], 4) })),
    );
    stage.tell(stage.say("told", { q, k, weight: fixed(answer.weights[i][j]) }));
  };
  const texts = (answer) => answer.weights.map((values, i) => values.map((w, j) => (answer.visible[i][j] ? fixed(w, 2) : "·")));
  const first = stage.answer;
  const part = heat({ cells: way(first.weights), visible: way(first.visible), texts: way(texts(first)), rows: tokens, columns: tokens, point: tell, id: "A" });
  const update = (answer) => {
    turned.update(stage.inputs.turned);
    caption.textContent = stage.say(stage.inputs.turned ? "a_turned" : "a");
    part.update({ cells: way(answer.weights), visible: way(answer.visible), texts: way(texts(answer)) });
    part.mark((a, b) => (stage.inputs.turned ? b : a) === pair[0]);
    explain(answer);
  };
  return { element: h("div", { className: "beside" }, h("div", { className: "fit" }, h("figcaption", {}, caption), part.element, h("p", { className: "faint small" }, stage.say("pair")), turned.element), about), update };
}

/** Softmax over the keys and over the queries, side by side, and for which K they agree. */
function directionOf(stage, tokens) {
  const tie = choice({ label: stage.say("tie"), value: stage.inputs.tie, options: stage.bounds.tie.map((name) => [name, stage.say(`tie_${name}`)]), id: "tie", set: (name) => stage.set({ tie: name }) });
  const texts = (rows) => rows.map((row) => row.map((w) => fixed(w, 2)));
  const [forth, back] = ["forth", "back"].map((name) => heat({ title: stage.say(name), axes: stage.say(`axes_${name}`), cells: stage.answer[name], texts: texts(stage.answer[name]), rows: tokens, columns: tokens, id: name }));
  const apart = figure(stage.say("apart"), { id: "apart" });
  const verdict = h("p", { id: "verdict" });
  const update = (answer) => {
    tie.update(stage.inputs.tie);
    forth.update({ cells: answer.forth, texts: texts(answer.forth) });
    back.update({ cells: answer.back, texts: texts(answer.back) });
    apart.update(answer.apart, fixed(answer.apart, 4));
    verdict.textContent = answer.agree ? stage.say("agree") : stage.say("differ", { symmetric: human(answer.symmetric) });
  };
  return { element: h("div", {}, tie.element, h("div", { className: "beside" }, forth.element, back.element, h("div", {}, apart.element, verdict))), update };
}
