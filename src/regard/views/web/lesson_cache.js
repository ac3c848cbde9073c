// The cache while a model writes: one query a step, used and dropped, while K and V grow; what is scored, and why Q is not kept.

import { fill, h } from "./dom.js";
import { human } from "./colour.js";
import { chips, entry } from "./lesson_more.js";
import { button, choice, fixed, heat, shares, slider } from "./lesson_parts.js";

const BEAT = 650; // milliseconds between two steps that run by themselves

export function start(stage) {
  const { inputs, bounds } = stage;
  const [first, last] = bounds.step;
  let [running, timer, drawn] = [false, 0, -1];

  const step = () => stage.set({ step: Math.min(last, stage.inputs.step + 1) });
  const run = (on) => {
    running = on && stage.inputs.step < last;
    clearTimeout(timer);
    playing.textContent = stage.say(running ? "pause" : "run");
    playing.setAttribute("aria-pressed", String(running));
    if (running) step();
  };
  const prompt = entry({ label: stage.say("prompt"), value: inputs.prompt, id: "prompt", most: 80, set: (text) => (run(false), stage.set({ prompt: text, step: undefined })) });
  const stepping = button(stage.say("step"), () => (run(false), step()), { id: "step" });
  const playing = button(stage.say("run"), () => run(!running), { id: "run", "aria-pressed": "false" });
  const beginning = button(stage.say("begin"), () => (run(false), stage.set({ step: first })), { id: "begin" });
  const text = h("p", { className: "written", id: "written" });
  const rows = { q: chips({ label: stage.say("q"), id: "q-row" }), k: chips({ label: stage.say("k"), id: "k-row" }), v: chips({ label: stage.say("v"), id: "v-row" }) };
  const [used, kept, rowTitle] = [h("p", { className: "faint number", id: "used" }), h("p", { className: "faint number", id: "kept" }), h("p", { className: "faint" })];
  const guesses = shares({ values: [], labels: [] });

  const length = slider({ label: stage.say("length"), value: inputs.length, bounds: bounds.length, id: "length", set: (x) => stage.set({ length: x }) });
  const pairs = shares({ values: [], labels: [] });
  const noQ = h("p", { id: "no-q" });

  const change = choice({ label: stage.say("change"), value: inputs.change, options: bounds.change.map((x) => [x, x]), id: "change", set: (x) => stage.set({ change: x }) });
  const place = slider({ label: stage.say("place"), value: inputs.place, bounds: bounds.place, id: "place", text: (n) => String(n + 1), set: (x) => stage.set({ place: x }) });
  const { places, changed } = stage.answer;
  const scores = heat({ cells: changed.scores, rows: places, columns: places, title: stage.say("scores"), id: "scores" });
  const outputs = heat({ cells: changed.rows.map((x) => [x]), rows: places, columns: ["y"], title: stage.say("outputs"), id: "outputs" });
  const verdict = h("p", { id: "verdict" });

  stage.element.addEventListener("keydown", (event) => {
    if (/^(INPUT|BUTTON)$/.test(event.target.tagName) && event.target !== playing && event.target !== stepping) return;
    if (event.key === "ArrowRight") run(false), step();
    else if (event.key === " " && event.target.tagName !== "BUTTON") run(!running);
    else return;
    event.preventDefault();
  });
  const watched = h("div", { tabIndex: 0, id: "watched" },
    text,
    rows.q.element, used, rows.k.element, rows.v.element, rowTitle, kept,
    h("figure", {}, h("figcaption", {}, stage.say("guesses")), guesses.element)); // prettier-ignore
  fill(
    stage.element,
    h("h4", {}, stage.say("watch")),
    prompt.element,
    h("div", { className: "buttons" }, stepping, playing, beginning),
    h("p", { className: "faint small" }, stage.say("hint")),
    watched,
    h("h4", {}, stage.say("pairs")),
    length.element,
    h("div", { id: "pairs" }, pairs.element),
    h("h4", {}, stage.say("alike")),
    change.element,
    place.element,
    h("div", { className: "beside" }, scores.element, outputs.element),
    verdict,
    noQ,
  );

  const drawStep = (answer) => {
    const { steps, tokens } = answer;
    const now = steps.at(-1);
    const read = steps.slice(1).map((each) => each.read.join("")).join("") + (now?.text ?? "");
    fill(text, answer.inputs.prompt, h("b", {}, read.replaceAll("␣", " ")));
    text.setAttribute("aria-label", `${stage.say("text")}: ${answer.inputs.prompt}${read}`);
    rows.q.update(now ? now.read : [], { name: () => "asks" });
    used.textContent = now ? stage.say("q_used", { queries: now.queries }) : stage.say("nothing");
    const fresh = (n) => (n >= tokens.length - (now?.queries ?? 0) ? "new" : "");
    const top = Math.max(...(now?.row ?? [1]));
    rows.k.update(tokens, { name: fresh, shade: (n) => now.row[n] / top, said: (n) => `${tokens[n]}: ${human(now.row[n])}` });
    rows.v.update(tokens, { name: fresh });
    kept.textContent = now ? stage.say("kv_held", { held: now.held, numbers: now.numbers }) : "";
    kept.dataset.value = now?.held ?? 0;
    rowTitle.textContent = now ? stage.say("row", { layer: answer.layer, head: answer.head }) : "";
    guesses.update({ values: now ? now.guesses.map((each) => each[1]) : [], labels: now ? now.guesses.map((each) => each[0]) : [], high: 1, mark: 0 });
    if (now && drawn !== steps.length) stage.tell(stage.say("told", { step: steps.length, text: now.text, queries: now.queries, held: now.held }));
    drawn = steps.length;
  };

  return (answer) => {
    const { prompt: begun, step: at, length: n, change: what, place: which } = stage.inputs;
    prompt.update(begun);
    length.update(n);
    change.update(what);
    place.update(which);
    [stepping.disabled, playing.disabled, beginning.disabled] = [at >= last, at >= last, at <= first];
    drawStep(answer);
    const names = Object.keys(answer.pairs);
    pairs.update({ values: names.map((name) => answer.pairs[name]), labels: names.map((name) => stage.say(name === "unmasked" ? "unmasked" : name === "causal" ? "causal" : "cached")), texts: names.map((name) => String(answer.pairs[name])), mark: names.indexOf("cached") });
    const found = answer.changed;
    const top = Math.max(...found.scores.flat(), 1e-12);
    scores.update({ cells: found.scores, texts: found.scores.map((row) => row.map((x) => fixed(x, 1))), high: top });
    outputs.update({ cells: found.rows.map((x) => [x]), texts: found.rows.map((x) => [fixed(x, 2)]), high: Math.max(...found.rows, 1e-12) });
    verdict.textContent = stage.say(`says_${answer.inputs.change}`, { n: answer.inputs.place + 1, rows: found.moved });
    noQ.textContent = stage.say("no_q", { held: answer.q_cache, length: answer.inputs.length, places: answer.places.length, ...answer.reads });
    if (at === answer.inputs.step && n !== inputs.length) stage.tell(stage.say("told_pairs", { length: n, ...answer.pairs }));
    inputs.length = n;
    clearTimeout(timer);
    if (running && at >= last) run(false);
    else if (running) timer = setTimeout(() => !stage.closed && running && step(), BEAT);
  };
}
