// Training before the reader's eyes: the loss falls, A sharpens, and a head that looks one to the left appears.

import { human } from "./colour.js";
import { fill, h } from "./dom.js";
import { curve } from "./lesson_curve.js";
import { button, choice, figure, fixed, heat, shares, slider } from "./lesson_parts.js";

export function start(stage) {
  const { inputs, bounds, answer: begun } = stage;
  const CURVES = ["loss", "entropy", "left"];
  let past = [];
  let training = false;

  const task = choice({ label: stage.say("task"), value: inputs.task, options: bounds.task.map((x) => [x, stage.say(`task_${x}`)]), id: "task", set: (x) => (stop(), stage.set({ task: x, rate: stage.answer.own[x] })) });
  const rate = choice({ label: stage.say("rate"), value: inputs.rate, options: bounds.rate.map((x) => [x, String(x)]), id: "rate", set: (x) => (stop(), stage.set({ rate: x })) });
  const steps = slider({ label: stage.say("steps"), value: inputs.steps, bounds: bounds.steps, id: "steps", set: (x) => stage.set({ steps: x }) });
  const stop = () => stage.cancel?.abort();
  const stopping = button(stage.say("stop"), stop, { id: "stop", disabled: true });
  const train = button(stage.say("train"), async () => {
    training = true;
    [train.disabled, stopping.disabled, past] = [true, false, []];
    await stage.stream(stage.inputs, (state) => {
      past.push(state);
      bar.value = state.step;
      drawState(state);
    });
    training = false;
    [train.disabled, stopping.disabled] = [false, true];
    if (past.length) stage.tell(says.textContent);
  }, { id: "train", className: "main" }); // prettier-ignore
  const bar = h("progress", { max: inputs.steps, value: 0, id: "progress" });
  const title = h("figcaption");
  const A = heat({ cells: begun.first.weights, rows: begun.rows, columns: begun.columns, id: "A-now" });
  A.table.classList.add("tight");
  const figures = {
    step: figure(stage.say("step"), { id: "at" }), loss: figure(stage.say("loss"), { id: "loss" }),
    entropy: figure(stage.say("entropy"), { id: "entropy" }), left: figure(stage.say("left"), { id: "left", note: stage.say("left_note") }),
  }; // prettier-ignore
  const names = { loss: stage.say("loss_curve"), entropy: stage.say("entropy_curve"), left: stage.say("left_curve") };
  const curves = Object.fromEntries(CURVES.map((name) => [name, curve({ title: names[name], series: [{ name: "", values: [0] }], labels: ["0"], low: 0, id: `${name}-curve` })]));
  const readout = shares({ values: [], labels: [] });
  const learned = h("figure", { id: "readout" }, h("figcaption", {}, stage.say("readout")), readout.element);
  const says = h("p", { id: "says", "aria-live": "off" });
  fill(
    stage.element,
    task.element, rate.element, steps.element,
    h("div", { className: "buttons" }, train, stopping), bar, says,
    h("div", { className: "beside" }, h("figure", {}, title, A.element), h("div", {}, h("div", { className: "figures" }, Object.values(figures).map((each) => each.element)), learned)),
    h("div", { className: "beside" }, CURVES.map((name) => curves[name].element)),
  ); // prettier-ignore

  const drawState = (state) => {
    const { even, deltas, inputs: asked, goal } = stage.answer;
    const left = asked.task === "left";
    A.update({ cells: state.weights, texts: state.weights.map((row) => row.map((x) => fixed(x, left ? 1 : 2))) });
    A.table.querySelectorAll("td[data-i]").forEach((cell) => cell.classList.toggle("goal", goal[Number(cell.dataset.i)] === Number(cell.dataset.j)));
    figures.step.update(state.step);
    figures.loss.update(state.loss, human(state.loss));
    figures.entropy.update(state.entropy, fixed(state.entropy, 3), stage.say("of", { most: fixed(even, 3) }));
    figures.left.update(state.share, fixed(state.share, 3));
    figures.left.element.hidden = !left;
    learned.hidden = !left;
    if (left) readout.update({ values: state.readout, labels: deltas.map((delta) => stage.say("delta", { delta })), texts: state.readout.map((x) => fixed(x, 2)), mark: state.readout.indexOf(Math.max(...state.readout)) });
    says.textContent = past.length ? stage.say(`says_${asked.task}`, { step: state.step, share: fixed(state.share, 3), entropy: fixed(state.entropy, 3) }) : stage.say("before");
    const shown = past.length ? past : [state];
    const labels = shown.map((each) => String(each.step));
    const values = { loss: (each) => each.loss, entropy: (each) => each.entropy, left: (each) => each.share };
    for (const name of CURVES) curves[name].update({ series: [{ name: "", values: shown.map(values[name]) }], labels, ...(name === "left" ? { high: 1 } : {}) });
  };

  return (answer) => {
    const now = stage.inputs;
    task.update(now.task);
    rate.update(now.rate);
    steps.update(now.steps);
    bar.max = now.steps;
    title.textContent = stage.say(answer.inputs.task === "left" ? "A" : "A_words");
    if (training) return;
    if (past.length && (past.task !== answer.inputs.task || past.rate !== answer.inputs.rate)) past = [];
    if (!past.length) [A.update({ cells: answer.first.weights, rows: answer.rows, columns: answer.columns }), (bar.value = 0)];
    [past.task, past.rate] = [answer.inputs.task, answer.inputs.rate];
    drawState(past.at(-1) ?? answer.first);
  };
}
