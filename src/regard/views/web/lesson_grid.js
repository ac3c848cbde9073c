// Positions on a grid: the grid beside its A and beside a matrix of the same size, rules over δ, a rule to draw, a digit's pixels.

import { human, palette } from "./colour.js";
import { fill, h } from "./dom.js";
import { GridView } from "./gridview.js";
import { pixels } from "./lesson_more.js";
import { button, choice, fixed, heat, shares, slider } from "./lesson_parts.js";
import { speak } from "./words.js";

/** The explorer's view of a grid, with numbers that are here already. */
class Board extends GridView {
  constructor(element, name, look, announce) {
    super(element, { look, announce });
    [this.cells.id, this.table.id, this.button.id, this.choice.id] = [`${name}-cells`, `${name}-deltas`, `${name}-deep`, `${name}-picture`];
    [this.colours, this.exact, this.pool, this.alone] = [palette("viridis"), true, 1, []];
  }

  /** The shape of the grid, mass per δ, and an image [rows][columns], 0 to 1, that lies under the weights. */
  give(shape, profile, image = null) {
    [this.geometry, this.h, this.w] = [{ k: shape }, ...shape];
    this.places = { q: { shape, first: 0 }, k: { shape, first: 0 } };
    this.profile = { mass: profile.flat(), shape: [profile.length, profile[0].length] };
    this.choice.hidden = !image;
    this.image = image ? canvasOf(image) : null;
  }

  row(weights, pair) {
    [this.weights, this.pair] = [weights, pair];
    this.weight = pair ? weights[pair.j] : null;
    this.draw();
  }
}

/** Ink is dark. */
function canvasOf(image) {
  const canvas = new OffscreenCanvas(image[0].length, image.length);
  const pen = canvas.getContext("2d");
  const picture = pen.createImageData(canvas.width, canvas.height);
  image.flat().forEach((x, n) => picture.data.set([255 * (1 - x), 255 * (1 - x), 255 * (1 - x), 255], 4 * n));
  pen.putImageData(picture, 0, 0);
  return canvas;
}

/** The drawings of the grid in lines: the board above shows them, flat and in perspective. */
export const owns = (block) => block.kind === "show" && block.parts.every((part) => part.kind === "table" && part.rows.flat().some((text) => text.includes("\n")));

const tight = (pair) => `(${pair.join(",")})`;

export function start(stage) {
  const { inputs, bounds, answer: begun } = stage;
  speak(stage.language);
  const side = begun.side;
  const cellOf = (n) => [Math.floor(n / side), n % side];
  const counted = (n, from = 0) => Array.from({ length: n }, (_, m) => String(m + from));

  // 6 x 6 twice: the pair is looked at here; which one it is goes into the address
  let pair = { i: inputs.query, j: inputs.key };
  let timer = 0;
  const look = (i, j) => {
    pair = { i: i ?? pair.i, j: j ?? pair.j };
    drawPair(stage.answer);
    clearTimeout(timer);
    timer = setTimeout(() => !stage.closed && (pair.i !== stage.inputs.query || pair.j !== stage.inputs.key) && stage.set({ query: pair.i, key: pair.j }), 400);
  };
  const slope = slider({ label: stage.say("slope"), value: inputs.slope, bounds: bounds.slope, id: "slope", text: (x) => fixed(x, 1), set: (x) => stage.set({ slope: x }) });
  const line = heat({ cells: begun.line, rows: counted(side), columns: counted(side), id: "line", title: stage.say("line_title", { side, shape: begun.line_shape, pairs: begun.line_pairs }), point: (i, j) => look(null, i * side + j) });
  const place = h("div", { className: "lesson-grid" });
  const board = new Board(place, "board", (i, j) => look(i, j), stage.announce);
  const whole = pixels({ title: stage.say("whole_title", { shape: begun.grid_shape, pairs: begun.grid_pairs }), id: "whole", point: (i, j) => look(i, j) });
  const [told, same] = [h("p", { className: "number", id: "pair" }), h("p", { className: "number", id: "same" })];
  const drawPair = (answer) => {
    const { i, j } = pair;
    board.row(answer.grid[i], pair);
    whole.mark(i, j);
    const [a, b] = [cellOf(i), cellOf(j)];
    const said = { q: i, k: j, qc: tight(a), kc: tight(b), delta: tight([a[0] - b[0], a[1] - b[1]]), weight: fixed(answer.grid[i][j]) };
    told.dataset.value = answer.grid[i][j];
    told.textContent = stage.say("pair", said);
    line.mark((r, c) => r === b[0] && c === b[1]);
    same.textContent = stage.say("same", { cell: tight(b), r: b[0], c: b[1], line: fixed(answer.line[b[0]][b[1]]), k: j, q: i, grid: fixed(answer.grid[i][j]) });
    stage.tell(stage.say("told", said));
  };

  // 2 x 3
  const [high, wide] = begun.shape;
  const [downs, rights] = [counted(2 * high - 1, 1 - high), counted(2 * wide - 1, 1 - wide)];
  const empty = downs.map(() => rights.map(() => 0));
  const deltas = heat({ cells: empty, rows: downs, columns: rights, title: stage.say("deltas"), id: "deltas", choose: (i, j) => stage.set({ delta: [i + 1 - high, j + 1 - wide] }) });
  const cells = counted(high * wide, 1);
  const rules = Object.fromEntries(["grid", "flat"].map((name) => [name, heat({ cells: begun.weights[name], visible: begun.visible[name], rows: cells, columns: cells, id: `rule-${name}` })]));
  const titles = { grid: h("figcaption"), flat: h("figcaption") };
  const verdict = h("p", { id: "wrong" });

  // Draw a rule
  const kind = choice({ label: stage.say("kind"), value: inputs.kind, options: bounds.kind.map((x) => [x, stage.say(`kind_${x}`)]), id: "kind", set: (x) => stage.set({ kind: x }) });
  const turned = (x) => (x ? 0 : bounds.strong);
  const press = (i, j) => {
    const { kind: now, rule, rows, columns } = stage.inputs;
    if (now === "cells") return stage.set({ rule: rule.map((row, a) => row.map((x, b) => (a === i && b === j ? turned(x) : x))) });
    const on = !(rows[i] && columns[j]);
    stage.set({ rows: rows.map((x, a) => (a === i ? turned(!on) : x)), columns: columns.map((x, b) => (b === j ? turned(!on) : x)) });
  };
  const clear = button(stage.say("clear"), () => stage.set({ rule: stage.inputs.rule.map((row) => row.map(() => 0)), rows: stage.inputs.rows.map(() => 0), columns: stage.inputs.columns.map(() => 0) }), { id: "clear" });
  const { deltas: all } = begun.drawn;
  const table = heat({ cells: begun.drawn.table, rows: all.map((row) => String(row[0][0])), columns: all[0].map((each) => String(each[1])), title: stage.say("table"), id: "table", choose: press });
  const [boardHigh, boardWide] = begun.board;
  const numbered = counted(boardHigh * boardWide, 1);
  let asks = numbered.length - 1;
  const drawn = heat({ cells: begun.drawn.weights, rows: numbered, columns: numbered, title: stage.say("A"), id: "drawn", point: (i) => ((asks = i), drawAsks(stage.answer)) });
  const asksTitle = h("figcaption");
  const laid = heat({ cells: counted(boardHigh).map(() => counted(boardWide).map(() => 0)), rows: counted(boardHigh), columns: counted(boardWide), id: "laid", choose: (i, j) => ((asks = i * boardWide + j), drawAsks(stage.answer)) });
  const drawNote = h("p", { className: "faint", id: "draw-note" });
  const onBoard = (row) => counted(boardHigh).map((_, i) => row.slice(i * boardWide, (i + 1) * boardWide));
  const drawAsks = (answer) => {
    const rows = onBoard(answer.drawn.weights[asks]);
    asksTitle.textContent = stage.say("on_board", { n: asks + 1 });
    laid.update({ cells: rows, texts: rows.map((row) => row.map((x) => fixed(x, 2))) });
    laid.mark((i, j) => i * boardWide + j === asks);
    drawn.mark((i) => i === asks);
  };

  // A digit
  const number = choice({ label: stage.say("number"), value: inputs.number, options: bounds.number.map((n) => [n, String(n)]), id: "number", set: (n) => stage.set({ number: n }) });
  const layer = choice({ label: stage.say("layer"), value: inputs.layer, options: bounds.layer.map((n) => [n, String(n)]), id: "layer", set: (n) => stage.set({ layer: n }) });
  const head = choice({ label: stage.say("head"), value: inputs.head, options: bounds.head.map((n) => [n, String(n)]), id: "head", set: (n) => stage.set({ head: n }) });
  const image = h("div", { className: "lesson-grid" });
  let key = null;
  const digit = new Board(image, "digit", (i, j) => {
    if (i !== null) return stage.set({ pixel: i });
    key = j;
    drawDigit(stage.answer);
  }, stage.announce); // prettier-ignore
  const pixelTitle = h("figcaption", { id: "pixel-title" });
  const received = pixels({ title: stage.say("received"), id: "received" });
  const learned = pixels({ title: stage.say("learned"), id: "learned" });
  const reads = shares({ values: [], labels: [] });
  const about = h("p", { className: "faint" });
  const drawDigit = (answer) => {
    const found = answer.digit;
    const top = found.top[0].cell[0] * answer.digit_side + found.top[0].cell[1];
    digit.row(found.weights.flat(), { i: answer.inputs.pixel, j: key ?? top });
  };

  fill(
    stage.element,
    h("h4", {}, stage.say("alike")), h("p", { className: "faint" }, stage.say("alike_note")), slope.element,
    h("div", { className: "beside" }, h("div", {}, line.element, same), whole.element),
    h("figure", {}, h("figcaption", {}, stage.say("board_title", { side })), place), told,
    h("h4", {}, stage.say("rule")), deltas.element,
    h("div", { className: "beside" }, Object.keys(rules).map((name) => h("figure", {}, titles[name], rules[name].element))), verdict,
    h("h4", {}, stage.say("draw")), kind.element, drawNote,
    h("div", { className: "beside" }, h("div", {}, table.element, h("div", { className: "buttons" }, clear)), h("figure", {}, asksTitle, laid.element)), drawn.element,
    h("h4", {}, stage.say("digit")), about, number.element, h("div", { className: "beside" }, layer.element, head.element),
    h("figure", {}, pixelTitle, image),
    h("div", { className: "beside" }, h("figure", { id: "reads" }, h("figcaption", {}, stage.say("reads")), reads.element), received.element, learned.element),
    h("p", { className: "faint small" }, stage.say("source", { data: begun.digit_about.data })),
  ); // prettier-ignore

  return (answer) => {
    const now = stage.inputs;
    slope.update(now.slope);
    line.update({ cells: answer.line, texts: answer.line.map((row) => row.map((x) => fixed(x, 2))), high: Math.max(...answer.line.flat()) });
    board.give([side, side], answer.profile);
    whole.update({ cells: answer.grid });
    drawPair(answer);
    const delta = answer.inputs.delta;
    deltas.update({ cells: downs.map((_, i) => rights.map((_, j) => (i + 1 - high === delta[0] && j + 1 - wide === delta[1] ? 1 : 0))) });
    deltas.update({ texts: downs.map((down) => rights.map((right) => tight([down, right]))) });
    const listed = (pairs) => pairs.map(tight).join(" ") || stage.say("none");
    for (const name of Object.keys(rules)) {
      rules[name].update({ cells: answer.weights[name], visible: answer.visible[name], texts: answer.weights[name].map((row, i) => row.map((x, j) => (answer.visible[name][i][j] ? human(x) : "·"))) });
      rules[name].mark((i, j) => name === "flat" && answer.pairs.wrong.some(([a, b]) => a === i + 1 && b === j + 1));
      titles[name].textContent = name === "grid" ? stage.say("by_grid", { delta: tight(delta), pairs: listed(answer.pairs.grid) }) : stage.say("by_flat", { delta: answer.flat, pairs: listed(answer.pairs.flat) });
    }
    verdict.textContent = answer.pairs.wrong.length ? stage.say("wrong", { wrong: listed(answer.pairs.wrong) }) : stage.say("fine");
    kind.update(now.kind);
    const { table: strengths, weights, numbers, deltas: entries } = answer.drawn;
    table.update({ cells: strengths, texts: strengths.map((row) => row.map((x) => human(x))), high: Math.max(bounds.strong, ...strengths.flat()) });
    drawn.update({ cells: weights, texts: weights.map((row) => row.map((x) => fixed(x, 2))) });
    drawAsks(answer);
    drawNote.textContent = answer.inputs.kind === "cells" ? stage.say("draw_note_cells", { numbers }) : stage.say("draw_note", { numbers, all: entries.flat().length });
    for (const [each, value] of [[number, now.number], [layer, now.layer], [head, now.head]]) each.update(value); // prettier-ignore
    const { digit: found, digit_about: made } = answer;
    about.textContent = stage.say("digit_note", { trained: made.trained, right: human(made.right, true), held: made.held_out, shape: found.shape });
    pixelTitle.textContent = stage.say("pixels", { cell: tight(found.cell) });
    digit.give([answer.digit_side, answer.digit_side], found.profile, found.image);
    drawDigit(answer);
    received.update({ cells: found.received });
    learned.update({ cells: found.learned, low: Math.min(...found.learned.flat()) });
    reads.update({ values: found.probabilities, labels: found.probabilities.map((_, n) => String(n)), high: 1, mark: found.probabilities.indexOf(Math.max(...found.probabilities)) });
    if (now.pixel !== inputs.pixel) stage.tell(stage.say("told_pixel", { cell: tight(found.cell), top: tight(found.top[0].cell) }));
    inputs.pixel = now.pixel;
  };
}
