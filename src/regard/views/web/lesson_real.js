// A trained model before a text of the reader's own: what each head does, the heat map of one, and what comes next.

import { human } from "./colour.js";
import { fill, h } from "./dom.js";
import { entry, pixels } from "./lesson_more.js";
import { button, choice, figure, fixed, shares } from "./lesson_parts.js";
import { post } from "./server.js";

export function start(stage) {
  const { inputs, bounds } = stage;
  const own = { text: undefined, layer: undefined, head: undefined };
  const model = choice({ label: stage.say("model"), value: inputs.model, options: bounds.model.map((x) => [x, stage.say(`model_${x}`)]), id: "model", set: (x) => stage.set({ ...own, model: x }) });
  const text = entry({ label: stage.say("text"), value: inputs.text, id: "text", most: bounds.longest, set: () => {} });
  const read = () => text.input.value.trim() && stage.set({ layer: undefined, head: undefined, text: text.input.value });
  text.input.addEventListener("keydown", (event) => event.key === "Enter" && read());
  const reading = button(stage.say("read"), read, { id: "read", className: "main" });
  const missing = h("p", { id: "missing" });
  const size = h("p", { className: "faint number", id: "size" });
  const unknown = h("p", { id: "unknown" });
  const heads = h("table", { className: "heads-grid", id: "heads" });
  const kinds = shares({ values: [], labels: [] });
  const map = pixels({ title: stage.say("point"), id: "A", point: (i, j) => pointed(i, j) });
  const pair = h("p", { className: "number", id: "pair", "aria-live": "polite" }, stage.say("point"));
  const figures = Object.fromEntries(["entropy", "previous", "self", "first"].map((name) => [name, figure({ entropy: stage.say("entropy"), previous: stage.say("previous"), self: stage.say("self"), first: stage.say("first") }[name], { id: name })]));
  const guesses = shares({ values: [], labels: [] });
  const next = h("figure", { id: "guesses" }, h("figcaption", {}, stage.say("guesses")), guesses.element);
  const explore = button(stage.say("explore"), async () => {
    const { model: name, text: given, layer, head } = stage.answer.inputs;
    try {
      const { id } = await post("/api/record", { model: name, text: given });
      location.href = `/#s=${id}&l=${layer}&h=${head}&lang=${stage.language}`;
    } catch (error) {
      stage.trouble(error);
    }
  }, { id: "explore" }); // prettier-ignore
  const all = h("div", {},
    size, unknown,
    h("p", { className: "faint" }, stage.say("heads")), h("div", { className: "wide" }, heads),
    h("div", { className: "beside" },
      h("figure", {}, map.caption, map.picture, pair),
      h("div", {}, h("div", { className: "figures" }, Object.values(figures).map((each) => each.element)), next)),
    h("figure", { id: "kinds" }, h("figcaption", {}, stage.say("kinds")), kinds.element),
    h("div", { className: "buttons" }, explore)); // prettier-ignore
  fill(stage.element, model.element, h("div", { className: "beside" }, text.element), h("div", { className: "buttons" }, reading), missing, all);

  const pointed = (i, j) => {
    const { labels, weights, visible } = stage.answer;
    pair.dataset.value = weights[i][j];
    pair.textContent = stage.say("pair", { q: labels[i], k: labels[j], weight: visible[i][j] ? human(weights[i][j]) : stage.page("masked") });
  };
  /** The heads as a table of buttons; the arrow keys go from one to the next. */
  const drawHeads = (answer) => {
    const { layer, head } = answer.inputs;
    if (heads.dataset.of !== JSON.stringify(answer.heads)) {
      heads.dataset.of = JSON.stringify(answer.heads);
      const cell = (does, l, n) => h("td", {}, h("button", { type: "button", data: { l, n }, "aria-label": `${l}.${n} ${does}`, on: { click: () => stage.set({ layer: l, head: n }) } }, does));
      fill(heads, h("thead", {}, h("tr", {}, h("td"), answer.heads[0].map((_, n) => h("th", { scope: "col" }, String(n))))), h("tbody", {}, answer.heads.map((row, l) => h("tr", {}, h("th", { scope: "row" }, String(l)), row.map((does, n) => cell(does, l, n))))));
    }
    heads.querySelectorAll("button").forEach((each) => each.setAttribute("aria-pressed", String(Number(each.dataset.l) === layer && Number(each.dataset.n) === head)));
  };
  heads.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(event.key in moves) || !event.target.dataset.l) return;
    const [l, n] = [Number(event.target.dataset.l) + moves[event.key][0], Number(event.target.dataset.n) + moves[event.key][1]];
    heads.querySelector(`button[data-l="${l}"][data-n="${n}"]`)?.focus();
    event.preventDefault();
  });

  return (answer) => {
    const now = stage.inputs;
    model.update(now.model);
    text.update(now.text);
    missing.hidden = !answer.missing;
    all.hidden = Boolean(answer.missing);
    if (answer.missing) {
      missing.textContent = stage.say("missing", { why: answer.missing, first: "pip install tokenizers", second: `pip install --no-deps ${answer.package}` });
      return stage.tell(missing.textContent);
    }
    const { layer, head } = answer.inputs;
    size.textContent = stage.say("tokens", { characters: answer.characters, tokens: answer.labels.length });
    unknown.hidden = !answer.unknown;
    unknown.textContent = answer.unknown ? stage.say("unknown", { unknown: answer.unknown, known: answer.known, all: answer.distinct }) : "";
    drawHeads(answer);
    map.caption.textContent = stage.say("map", { layer, head, does: answer.does, shape: answer.shape });
    map.update({ cells: answer.weights, visible: answer.visible, rows: answer.labels, columns: answer.labels, low: 0, high: 1 });
    for (const name of Object.keys(figures)) figures[name].update(answer[name], fixed(answer[name], 3));
    kinds.update({ values: answer.kinds.map((each) => each[1]), labels: answer.kinds.map((each) => each[0]), texts: answer.kinds.map((each) => String(each[1])) });
    next.hidden = !answer.guesses.length;
    guesses.update({ values: answer.guesses.map((each) => each[1]), labels: answer.guesses.map((each) => each[0]), mark: 0 });
    stage.tell(stage.say("told", { layer, head, does: answer.does }));
  };
}
