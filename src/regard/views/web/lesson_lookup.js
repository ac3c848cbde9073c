// The soft look-up: a store, a query to move along the line of its keys, and what each way of weighing makes of it.

import { fill, h } from "./dom.js";
import { human } from "./colour.js";
import { curve } from "./lesson_curve.js";
import { choice, figure, fixed, shares, slider, svg } from "./lesson_parts.js";

const [WIDE, HIGH, EDGE] = [560, 168, 26];

export const after = 2; // what is said first

export function start(stage) {
  const { inputs, bounds, answer } = stage;
  const way = choice({ label: stage.say("way"), value: inputs.way, options: bounds.way.map((name) => [name, stage.say(`way_${name}`)]), id: "way", set: (name) => stage.set({ way: name }) });
  const query = slider({ label: stage.say("query"), value: inputs.query, bounds: bounds.query, id: "query", set: (x) => stage.set({ query: x }) });
  const sigma = slider({ label: stage.say("sigma"), value: inputs.sigma, bounds: bounds.sigma, id: "sigma", set: (x) => stage.set({ sigma: x }) });
  const nearest = slider({ label: stage.say("nearest"), value: inputs.nearest, bounds: bounds.nearest, id: "nearest", set: (x) => stage.set({ nearest: x }) });
  const line = lineOf(stage);
  const table = h("table", { className: "plain", id: "store" });
  const fields = answer.keys.map((key, n) => {
    const change = (event) => Number.isFinite(event.target.valueAsNumber) && stage.set({ values: stage.inputs.values.map((old, m) => (m === n ? event.target.valueAsNumber : old)) });
    return h("input", { type: "number", className: "cell", min: bounds.values[0], max: bounds.values[1], step: bounds.values[2], "aria-label": stage.say("value_of", { key }), on: { input: change } });
  });
  const result = figure(stage.say("answer"), { id: "result" });
  const all = shares({ values: [], labels: [] });
  const answers = curve({ title: stage.say("curve"), series: [{ name: "", values: answer.curve }], labels: answer.places.map((x) => human(x)), text: (x) => fixed(x, 2), id: "answers", choose: (n) => stage.set({ query: stage.answer.places[n] }) });
  const says = h("p", { id: "says" });
  const code = h("code", { id: "code" });
  fill(
    stage.element,
    way.element, query.element, sigma.element, nearest.element,
    h("div", { className: "beside" },
      h("figure", {}, h("figcaption", { className: "faint" }, stage.say("line")), line.element, h("div", { className: "wide" }, table)),
      h("div", {}, result.element, says, h("p", {}, code))),
    h("div", { className: "beside" }, answers.element, h("figure", { id: "all" }, h("figcaption", {}, h("b", {}, stage.say("all"))), all.element)),
  ); // prettier-ignore

  return (answer) => {
    const now = stage.inputs;
    way.update(now.way);
    query.update(now.query);
    sigma.update(now.sigma);
    nearest.update(now.nearest);
    sigma.element.hidden = now.way !== "gauss";
    nearest.element.hidden = now.way !== "nearest";
    line.update(answer);
    fields.forEach((field, n) => document.activeElement !== field && (field.value = now.values[n]));
    const head = ["key", "value", "distance", "weight", "part"].map((name, n) => h("th", { scope: "col", className: n ? "n" : "" }, stage.say(name)));
    if (!table.tBodies.length) fill(table, h("thead", {}, h("tr", {}, head)), h("tbody", {}, answer.keys.map((key, n) => h("tr", {}, h("th", { scope: "row" }, human(key)), h("td", { className: "n" }, fields[n]), h("td", { className: "n" }), h("td", { className: "n weight" }), h("td", { className: "n" })))));
    answer.keys.forEach((_, n) => {
      const [, , distance, weight, part] = table.tBodies[0].rows[n].cells;
      distance.textContent = human(answer.distances[n]);
      weight.textContent = fixed(answer.weights[n]);
      weight.dataset.value = answer.weights[n];
      weight.title = answer.fractions[n];
      part.textContent = fixed(answer.parts[n], 3);
    });
    result.update(answer.result, fixed(answer.result));
    const most = answer.weights.indexOf(Math.max(...answer.weights));
    says.textContent = stage.say(`says_${answer.inputs.way}`, { count: answer.inputs.nearest, key: human(answer.keys[answer.inputs.way === "dot" ? most : answer.farthest]), weight: fixed(Math.max(...answer.weights)) });
    code.textContent = answer.code;
    const names = Object.keys(answer.results);
    all.update({ values: names.map((name) => answer.results[name]), labels: names.map((name) => stage.say(`way_${name}`)), texts: names.map((name) => fixed(answer.results[name])), mark: names.indexOf(answer.inputs.way) });
    answers.update({ series: [{ name: "", values: answer.curve }], low: Math.min(...answer.curve, ...answer.values), high: Math.max(...answer.curve, ...answer.values), mark: nearestPlace(answer) });
    stage.tell(stage.say("told", { query: human(answer.inputs.query), answer: fixed(answer.result), weights: answer.weights.map((w) => fixed(w)).join(", ") }));
  };
}

const nearestPlace = ({ places, inputs }) => places.reduce((best, x, n) => (Math.abs(x - inputs.query) < Math.abs(places[best] - inputs.query) ? n : best), 0);

/** The keys on a line, each with its weight as a column, and the query, which can be moved. */
function lineOf(stage) {
  const [low, high, step] = stage.bounds.query;
  const x = (value) => EDGE + ((value - low) / (high - low)) * (WIDE - 2 * EDGE);
  const base = HIGH - 46;
  const marks = svg("g", {});
  const handle = svg("g", { class: "handle query", id: "query-handle", tabindex: 0, role: "slider", "aria-label": stage.say("query"), "aria-valuemin": low, "aria-valuemax": high }, svg("circle", { r: 9, cy: base }), svg("circle", { r: 22, cy: base, class: "grip" }), svg("text", { y: base + 40, "text-anchor": "middle" }));
  const picture = svg("svg", { class: "line", viewBox: `0 0 ${WIDE} ${HIGH}` }, svg("line", { x1: EDGE, x2: WIDE - EDGE, y1: base, y2: base, class: "axis" }), marks, handle);
  const move = (value) => {
    const on = Number(Math.max(low, Math.min(high, Math.round(value / step) * step)).toFixed(6));
    place(on);
    stage.set({ query: on });
  };
  const place = (value) => {
    handle.setAttribute("transform", `translate(${x(value)} 0)`);
    handle.setAttribute("aria-valuenow", value);
    handle.lastChild.textContent = `q = ${human(value)}`;
  };
  const drag = (event) => {
    const box = picture.getBoundingClientRect();
    move(low + ((((event.clientX - box.left) / box.width) * WIDE - EDGE) / (WIDE - 2 * EDGE)) * (high - low));
  };
  picture.addEventListener("pointerdown", (event) => (picture.setPointerCapture(event.pointerId), handle.focus(), drag(event), event.preventDefault()));
  picture.addEventListener("pointermove", (event) => picture.hasPointerCapture(event.pointerId) && drag(event));
  handle.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    move(stage.inputs.query + by * step * (event.shiftKey ? 4 : 1));
  });
  const update = ({ keys, weights }) => {
    place(stage.inputs.query);
    fill(marks, keys.flatMap((key, n) => {
      const tall = weights[n] * (base - 24);
      return [
        svg("rect", { x: x(key) - 9, width: 18, y: base - tall, height: Math.max(tall, 1), class: "weight" }),
        svg("text", { x: x(key), y: base - tall - 5, "text-anchor": "middle", class: "share" }, fixed(weights[n], 3)),
        svg("circle", { cx: x(key), cy: base, r: 4, class: "key" }),
        svg("text", { x: x(key), y: base + 20, "text-anchor": "middle", class: "key" }, human(key)),
      ];
    })); // prettier-ignore
  };
  return { element: picture, update };
}
