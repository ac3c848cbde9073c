// Why the dot product: vectors to drag, and every score of them, live.

import { human } from "./colour.js";
import { fill, h } from "./dom.js";
import { button, choice, fixed, numbers, svg } from "./lesson_parts.js";

const SIZE = 380; // of the plane, in its own units

export const after = 1; // what is said first

export function start(stage) {
  const { inputs, bounds, answer } = stage;
  const flat = inputs.query.length === 2;
  const data = choice({ label: stage.say("data"), value: inputs.data, options: bounds.data.map((name) => [name, name === "plane" ? stage.say("data_plane") : answer.sets[name].join(" ")]), id: "data", set: (name) => (stage.set({ data: name, query: undefined, keys: undefined }), rebuild()) });
  // another set of vectors has other sizes: everything is built anew for it
  const rebuild = async () => {
    while (!stage.settled) await new Promise((done) => setTimeout(done, 20));
    fill(stage.element);
    stage.draw = start(stage);
    stage.draw(stage.answer);
    document.querySelector("#data input:checked").focus();
  };
  const names = [answer.name, ...answer.names];
  const all = () => [stage.inputs.query, ...stage.inputs.keys];
  const put = (n, vector) => stage.set(n === 0 ? { query: vector } : { keys: stage.inputs.keys.map((old, m) => (m === n - 1 ? vector : old)) });
  const plane = planeOf(stage, { flat, names, put });
  const table = numbers({ title: stage.say("vector"), values: all(), rows: names, bounds: bounds.number, digits: 1, id: "vectors", set: (i, j, x) => put(i, all()[i].map((old, m) => (m === j ? x : old))) });
  const turns = Object.keys(answer.turned).map((name) => button(stage.say(`turn_${name}`), () => stage.set({ keys: stage.answer.turned[name] }), { id: `turn-${name}` }));
  const measures = h("table", { className: "plain", id: "measures" });
  const scores = h("table", { className: "plain", id: "scores" });
  const reads = h("ul", { id: "reads" });
  fill(
    stage.element,
    data.element,
    h("p", { className: "faint" }, stage.say(flat ? "hint_plane" : "hint_space")),
    h("div", { className: "beside" },
      h("div", {}, plane.element, flat ? h("div", { className: "buttons" }, h("span", {}, stage.say("turn", { name: answer.names[0] })), turns) : null),
      h("div", {}, table.element, h("div", { className: "wide" }, measures), reads)),
    h("h4", {}, stage.say("scores")),
    h("div", { className: "wide" }, scores),
  ); // prettier-ignore

  return (answer) => {
    data.update(stage.inputs.data);
    if (stage.inputs.query.length !== answer.inputs.query.length || answer.name !== names[0]) return; // it is about to be built anew
    table.update(all());
    plane.update(answer);
    const column = (name, values, text) => [h("th", { scope: "col", className: "n" }, stage.say(name)), values.map((x) => h("td", { className: "n", data: { value: x, what: name } }, text(x)))];
    const columns = [column("dot", answer.dots, human), column("cosine", answer.cosines, fixed), column("angle", answer.angles, (x) => `${fixed(x, 0)}°`), column("away", answer.away, human)];
    fill(measures, h("thead", {}, h("tr", {}, h("td"), columns.map(([head]) => head))), h("tbody", {}, answer.names.map((name, n) => h("tr", {}, h("th", { scope: "row", className: "k" }, name), columns.map(([, cells]) => cells[n])))));
    fill(scores, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, stage.say("score")), answer.names.map((name) => h("th", { scope: "col", className: "n" }, name)), h("th", { scope: "col" }, stage.say("cost")))),
      h("tbody", {}, answer.scores.map(({ name, weights, cost }) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), weights.map((w) => h("td", { className: "n", data: { value: w } }, fixed(w))), h("td", {}, cost))))); // prettier-ignore
    fill(reads, answer.names.map((name, n) => h("li", {}, stage.say(`reads_${answer.reads[n]}`, { name, query: answer.name, angle: fixed(answer.angles[n], 0) }))));
    stage.tell(answer.names.map((name, n) => stage.say("told", { name, dot: human(answer.dots[n]), cosine: fixed(answer.cosines[n], 2), away: human(answer.away[n]) })).join(" "));
  };
}

/** The vectors as arrows. In the plane their tips can be moved; of longer ones the angle to the query and the length are drawn. */
function planeOf(stage, { flat, names, put }) {
  const [, reach, step] = stage.bounds.number;
  const lines = svg("g", {});
  const span = () => (flat ? reach : 1.15 * Math.max(stage.answer.lengths.q, ...stage.answer.lengths.k, step));
  const at = ([x, y], most) => [SIZE / 2 + ((x / most) * SIZE) / 2, SIZE / 2 - ((y / most) * SIZE) / 2];
  const tips = names.map((name, n) => {
    const [label, dot] = [svg("text", { y: n ? -12 : 24, "text-anchor": "middle" }, name), svg("circle", { r: flat ? 9 : 5 })];
    const tip = svg("g", { class: `handle ${n ? "key" : "query"}`, tabindex: flat ? 0 : null, role: flat ? "slider" : null, "data-name": name, "aria-valuemin": -reach, "aria-valuemax": reach }, dot, flat ? svg("circle", { r: 20, class: "grip" }) : null, label); // a finger needs more than a dot
    tip.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!by || !flat) return;
      event.preventDefault();
      const now = n ? stage.inputs.keys[n - 1] : stage.inputs.query;
      put(n, now.map((x, axis) => rounded(x + by[axis] * step * (event.shiftKey ? 10 : 1))));
    }); // prettier-ignore
    return tip;
  });
  const rounded = (x) => Number(Math.max(-reach, Math.min(reach, Math.round(x / step) * step)).toFixed(6));
  const grid = [-1, 0, 1].flatMap((n) => [
    svg("line", { x1: 0, x2: SIZE, y1: SIZE / 2 + (n * SIZE) / 4, y2: SIZE / 2 + (n * SIZE) / 4, class: n ? "rule" : "axis" }),
    svg("line", { y1: 0, y2: SIZE, x1: SIZE / 2 + (n * SIZE) / 4, x2: SIZE / 2 + (n * SIZE) / 4, class: n ? "rule" : "axis" }),
  ]);
  const picture = svg("svg", { class: "plane", viewBox: `0 0 ${SIZE} ${SIZE}`, id: "plane" }, grid, lines, tips.slice().reverse());
  let held = null;
  const drag = (event) => {
    const box = picture.getBoundingClientRect();
    put(held, [((event.clientX - box.left) / box.width) * 2 - 1, 1 - ((event.clientY - box.top) / box.height) * 2].map((x) => rounded(x * reach)));
  };
  tips.forEach((tip, n) => flat && tip.addEventListener("pointerdown", (event) => {
    held = n;
    picture.setPointerCapture(event.pointerId);
    tip.focus();
    event.preventDefault();
  })); // prettier-ignore
  picture.addEventListener("pointermove", (event) => held !== null && drag(event));
  picture.addEventListener("pointerup", () => (held = null));
  picture.addEventListener("pointercancel", () => (held = null));
  const update = (answer) => {
    const most = span();
    // of a longer vector: as far from the query's direction as its angle, as long as it is
    const seen = (n) => {
      if (flat) return n ? stage.inputs.keys[n - 1] : stage.inputs.query;
      const [angle, length] = n ? [((answer.angles[n - 1] ?? 0) * Math.PI) / 180, answer.lengths.k[n - 1]] : [0, answer.lengths.q];
      return [length * Math.cos(angle), length * Math.sin(angle)];
    };
    fill(lines, names.map((_, n) => {
      const [x, y] = at(seen(n), most);
      return svg("line", { x1: SIZE / 2, y1: SIZE / 2, x2: x, y2: y, class: `vector ${n ? "key" : "query"}` });
    })); // prettier-ignore
    tips.forEach((tip, n) => {
      tip.setAttribute("transform", `translate(${at(seen(n), most).join(" ")})`);
      const vector = n ? stage.inputs.keys[n - 1] : stage.inputs.query;
      const said = stage.say("tip", { name: names[n], vector: vector.map((x) => human(x)).join(", ") });
      tip.setAttribute("aria-label", said);
      tip.setAttribute("aria-valuenow", vector[0]);
      tip.setAttribute("aria-valuetext", said);
    });
  };
  return { element: picture, update };
}
