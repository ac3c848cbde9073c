// Errors in common explanations: each claim with a button that runs its check, and the numbers that decide it.

import { fill, h } from "./dom.js";
import { button, fixed } from "./lesson_parts.js";

/** The claims with their verdicts stand here, not below: a reader decides first. */
export const owns = (block) => block.kind === "paragraph" && Boolean(block.label);

export function start(stage) {
  const cards = Object.entries(stage.answer.claims).map(([name, text]) => {
    const result = h("div", { className: "result" });
    const run = button(stage.say("run"), () => stage.set({ claim: name, draws: undefined }), { id: `run-${name}`, "aria-label": stage.say("run_of", { claim: text }) });
    const others = button(stage.say("others"), () => stage.set({ claim: name, draws: next(stage) }), { id: `others-${name}`, hidden: true });
    const claim = h("b", {}, `“${text}”`);
    return { name, run, others, result, claim, element: h("div", { className: "claim", id: `claim-${name}` }, h("p", {}, claim), h("div", { className: "buttons" }, run, others), result) };
  });
  fill(stage.element, h("p", { className: "faint" }, stage.say("intro")), cards.map((card) => card.element));

  return (answer) => {
    const card = cards.find((each) => each.name === answer.inputs.claim);
    if (!card) return;
    card.others.hidden = !answer.drawn.includes(card.name);
    card.element.dataset.holds = answer.holds;
    fill(card.result, h("p", { className: answer.holds ? "right" : "wrong" }, answer.verdict), tableOf(stage, answer.evidence));
    stage.tell(answer.verdict);
  };
}

/** Another draw, until there are no more: then the first again. */
function next(stage) {
  const [low, high] = stage.bounds.draws;
  return stage.inputs.draws >= high ? low : (stage.inputs.draws ?? low) + 1;
}

function tableOf(stage, { header, rows }) {
  const head = (name) => (/^k\d/.test(name) ? name : stage.say(`col_${name}`));
  const whole = header.map((_, n) => rows.every((row) => typeof row[n] !== "number" || Number.isInteger(row[n])));
  const cell = (x, n) => {
    if (x === null) return h("td", { className: "n" }, "–");
    if (typeof x === "number") return h("td", { className: "n", data: { value: x } }, fixed(x, whole[n] ? 0 : 4));
    return h("td", {}, `cell_${x}` in stage.says ? stage.say(`cell_${x}`) : x);
  };
  return h("div", { className: "wide" }, h("table", { className: "plain" }, h("thead", {}, h("tr", {}, header.map((name, n) => h("th", { scope: "col", className: n ? "n" : "" }, head(name))))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell))))));
}
