// A text of the reader's own: its A with and without position and mask, what can be read off it, and one weight explained.

import { human } from "./colour.js";
import { fill, h } from "./dom.js";
import { curve } from "./lesson_curve.js";
import { entry } from "./lesson_more.js";
import { choice, figure, fixed, heat, shares, slider } from "./lesson_parts.js";

export function start(stage) {
  const { inputs, bounds, answer: begun } = stage;
  const text = entry({ label: stage.say("text"), value: inputs.text, id: "text", most: bounds.longest, set: (x) => stage.set({ text: x, query: undefined, key: undefined }) });
  const size = h("p", { className: "faint number", id: "size" });
  const part = choice({ label: stage.say("part"), value: inputs.part, options: bounds.part.map((x) => [x, stage.say(`part_${x}`)]), id: "part", set: (x) => stage.set({ part: x }) });
  const fall = slider({ label: stage.say("fall"), value: inputs.fall, bounds: bounds.fall, id: "fall", text: (x) => fixed(x, 1), set: (x) => stage.set({ fall: x }) });
  const title = h("figcaption");
  const A = heat({ cells: begun.weights, visible: begun.visible, rows: begun.labels, columns: begun.labels, id: "map", choose: (i, j) => stage.set({ query: i, key: j }) });
  A.table.classList.add("tight");
  const pair = h("h4", { id: "pair" });
  const why = h("table", { className: "plain", id: "why" });
  const rowTitle = h("figcaption");
  const row = shares({ values: [], labels: [] });
  const entropy = figure(stage.say("entropy"), { id: "entropy" });
  const of = shares({ values: [], labels: [] });
  const profile = curve({ title: stage.say("profile"), series: [{ name: "", values: begun.profile }], labels: begun.deltas.map(String), id: "profile", text: (x) => fixed(x, 2) });
  fill(
    stage.element,
    text.element, size, part.element, fall.element,
    h("div", { className: "beside" },
      h("figure", {}, title, A.element),
      h("div", {}, pair, h("div", { className: "wide" }, why), h("figure", {}, rowTitle, row.element), entropy.element)),
    h("div", { className: "beside" }, h("figure", { id: "shares" }, h("figcaption", {}, stage.say("shares")), of.element), profile.element),
    h("p", { className: "faint small" }, stage.say("random")),
  ); // prettier-ignore

  return (answer) => {
    const now = stage.inputs;
    text.update(now.text);
    part.update(now.part);
    fall.update(now.fall);
    fall.element.hidden = now.part === "content";
    const { query: i, key: j } = answer.inputs;
    const { labels, explain } = answer;
    size.textContent = stage.say("size", { characters: labels.length, bytes: answer.bytes });
    title.textContent = stage.say("map", { shape: answer.shape });
    A.update({ cells: answer.weights, visible: answer.visible, rows: labels, columns: labels });
    A.mark((a, b) => a === i && b === j);
    pair.textContent = stage.say("pair", { q: labels[i], k: labels[j] });
    const line = (name, x, id) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { className: "n", id, data: { value: x } }, x === null ? human(-Infinity) : fixed(x)));
    fill(
      why,
      h("tbody", {}, Object.entries(explain.parts).map(([name, x]) => line(name.replace(/\(.*/, ""), x)), line(stage.say("logit"), explain.logit), line(stage.say("lse"), explain.lse), line(stage.say("weight"), explain.weight, "weight")),
      answer.visible[i][j] ? null : h("caption", {}, stage.say("hidden")),
    );
    rowTitle.textContent = stage.say("row", { q: labels[i] });
    row.update({ values: answer.row.keys.map((each) => each[1]), labels: answer.row.keys.map((each) => each[0]), high: 1 });
    entropy.update(answer.row.entropy, fixed(answer.row.entropy, 3));
    const names = Object.keys(answer.shares);
    of.update({ values: names.map((name) => answer.shares[name]), labels: names.map((name) => stage.say(`share_${name}`)), high: 1 });
    profile.update({ series: [{ name: "", values: answer.profile }], labels: answer.deltas.map(String) });
    stage.tell(stage.say("told", { q: labels[i], k: labels[j], weight: fixed(explain.weight) }));
  };
}
