// The closing quiz: choose an answer or think of one, then read what is right, with numbers computed now.

import { fill, h } from "./dom.js";
import { button, figure } from "./lesson_parts.js";

/** The questions are asked here; below they would stand with their answers. */
export const owns = (block) => block.kind === "question";

export function start(stage) {
  const { options, thought } = stage.bounds;
  const answered = (at, x) => stage.set({ answers: stage.inputs.answers.map((old, n) => (n === at ? x : old)) });
  const score = figure(stage.say("score"), { id: "score" });
  const cards = stage.answer.questions.map(({ name, question }, at) => {
    const inputs = Array.from({ length: options }, (_, n) => h("input", { type: "radio", name: `quiz-${name}`, id: `quiz-${name}-${n + 1}`, on: { change: () => answered(at, n + 1) } }));
    const labels = inputs.map((input, n) => h("label", { htmlFor: input.id, className: "option" }, input, h("span", {}, stage.say(`option_${name}_${n + 1}`))));
    const reveal = button(stage.say("reveal"), () => answered(at, thought), { id: `reveal-${name}` });
    const result = h("div", { className: "result" });
    const element = h("fieldset", { className: "claim", id: `question-${name}` }, h("legend", {}, h("b", {}, `${at + 1}. ${question}`)), labels, reveal, result);
    return { inputs, labels, reveal, result, element };
  });
  fill(stage.element, h("p", { className: "faint" }, stage.say("intro")), cards.map((card) => card.element), h("div", { className: "figures" }, score.element));

  let last = null;
  return (answer) => {
    answer.questions.forEach(({ chosen, right, answer: why }, at) => {
      const { inputs, labels, reveal, result, element } = cards[at];
      inputs.forEach((input, n) => (input.checked = chosen === n + 1));
      labels.forEach((label, n) => {
        label.classList.toggle("right", right === n + 1);
        label.classList.toggle("wrong", chosen === n + 1 && right !== n + 1);
      });
      reveal.hidden = Boolean(chosen);
      element.dataset.right = right ?? "";
      const verdict = chosen > 0 ? stage.say(chosen === right ? "correct" : "incorrect") : "";
      fill(result, why ? h("p", {}, verdict ? h("b", {}, `${verdict} `) : null, why.replaceAll("`", "")) : null);
      const told = why ? stage.say("told", { verdict, answer: why }) : null;
      if (told && last && last[at] !== chosen) stage.tell(told);
    });
    last = answer.questions.map(({ chosen }) => chosen);
    score.update(answer.score, String(answer.score), stage.say("score_of", { chosen: answer.chosen, of: answer.of }));
  };
}
