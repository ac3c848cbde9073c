// A trace in one file: no server, no network. The numbers are in the page; map.js shows them as it does everywhere.

import { MAPS, SCALES, drawBar, human } from "./colour.js";
import { fill, h, ink } from "./dom.js";
import { AttentionMap } from "./map.js";
import { Overview, nameOf } from "./overview.js";
import { Panels } from "./panels.js";
import { Tokens } from "./tokens.js";
import { LANGUAGES, say, speak, spoken } from "./words.js";

const $ = (id) => document.getElementById(id);
const next = (list, now) => list[(list.indexOf(now) + 1) % list.length];
const given = JSON.parse($("data").textContent);
const state = { look: 0, head: given.looks[0].heads[0], scale: "linear", map: "viridis", hideFirst: false };
let [map, open, overview, panels, tokens] = [null, null, null, null, null];

/** Numbers that were deflated and written in base 64. */
async function bytes(text) {
  const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

/** Weights: as they are, or as 16-bit logarithms (2 to the power of -code / 2000; 0 nothing visible, 65535 zero). */
async function weightsOf({ kind, data }) {
  const buffer = await bytes(data);
  if (kind === "float32") return new Float32Array(buffer);
  return Float32Array.from(new Uint16Array(buffer), (code) => (code === 0 ? NaN : code === 65535 ? 0 : 2 ** (-(code - 1) / 2000)));
}

/** A look with its numbers, unpacked when it is first shown. */
async function unpacked(n) {
  const look = given.looks[n];
  if (!look.ready) {
    const [mean, weight, key] = await Promise.all([weightsOf(look.mean), weightsOf(look.top), bytes(look.keys)]);
    look.ready = { mean, weight, key: look.wide ? new Uint32Array(key) : new Uint16Array(key) };
  }
  return look;
}

async function show(n, head) {
  Object.assign(state, { look: n, head });
  const look = await unpacked(n);
  const at = look.heads.indexOf(head);
  const size = look.rows * look.cols;
  const mean = look.ready.mean.subarray(at * size, (at + 1) * size);
  const labels = { get: (side, i) => given.sequences[look.labels[side]]?.[i] ?? String(i) };
  open = { look, at, labels };
  const provider = {
    qLen: look.q_len, kLen: look.k_len, levels: [look.cell], tile: Math.max(look.rows, look.cols), label: (side, i) => labels.get(side, i),
    fetchTile: async () => ({ rows: look.rows, cols: look.cols, mean, max: mean, first: null, exact: true }),
    rowPeaks: async () => ({ all: rowsOf(mean, look), rest: rowsOf(mean, look), exact: true }),
  }; // prettier-ignore
  const cursor = map?.locked;
  map?.close();
  const canvas = h("canvas", { tabIndex: 0, role: "application", "aria-label": nameOf(look), "aria-describedby": "readout" });
  fill($("maps"), h("figure", {}, h("figcaption", {}, `${given.name} · ${nameOf(look)} · ${say("head")} ${head}`), canvas));
  map = new AttentionMap(canvas, provider, { scale: state.scale, map: state.map, axes: { q: say("query"), k: say("key") } });
  map.addEventListener("range", bar);
  map.addEventListener("hover", ({ detail }) => point(detail ?? map.locked));
  map.addEventListener("lock", ({ detail }) => point(detail));
  bar();
  tokens.open(`${n}/${head}`, look.k_len, labels);
  overview.mark(`${n}/${head}`, state.map);
  toolbar();
  panels.clear();
  statistics(look, at);
  if (cursor && cursor.i < look.q_len && cursor.j < look.k_len) map.look(cursor.i, cursor.j, { lock: true });
  window.regard = { map, state, given, topOf };
}

const rowsOf = (mean, { rows, cols }) =>
  Float32Array.from({ length: rows }, (_, row) => mean.subarray(row * cols, (row + 1) * cols).reduce((most, x) => (x > most ? x : most), 0));

/** The strongest keys of a query. */
function topOf(i) {
  const { look, at } = open;
  const start = (at * look.q_len + i) * look.kept;
  const found = [];
  for (let n = start; n < start + look.kept; n++) if (look.ready.key[n]) found.push({ j: look.ready.key[n] - 1, weight: look.ready.weight[n] });
  return found;
}

function point(pair) {
  if (!pair) return;
  const { look, labels } = open;
  const top = topOf(pair.i);
  const exact = top.find((each) => each.j === pair.j)?.weight;
  const cell = map.shown(pair.i, pair.j)?.value;
  const [q, k] = [labels.get("q", pair.i), labels.get("k", pair.j)];
  const value = look.cell === 1 ? cell : exact;
  const names = h("div", {}, h("span", { className: "q" }, `${say("query")} ${pair.i} “${q}”`), " → ", h("span", { className: "k" }, `${say("key")} ${pair.j} “${k}”`));
  const small = look.cell === 1 ? null : h("div", { className: "faint" }, `${say("cellIs")} ${human(cell)}`);
  fill(panels.pair, h("h2", {}, say("pair")), names, value === undefined ? null : h("div", { className: "big", id: "weight", data: { value } }, human(value)), small);
  panels.showKeys(panels.keys, say("topKeys"), top, "j", (j) => map.look(pair.i, j, { lock: true }), (j) => labels.get("k", j), "");
  tokens.show(pair);
  $("live").textContent = say("readout", { ...pair, q, k, weight: human(value ?? cell) });
}

function statistics(look, at) {
  const rows = look.statistics?.[at];
  if (!rows) return;
  const names = { self: "selfShare", previous: "previous", first: "first", induction: "induction", toeplitz: "toeplitz" };
  const list = Object.entries(names).filter(([name]) => rows[name] !== null && rows[name] !== undefined);
  fill(panels.profiles, h("h2", {}, say("shares")), h("dl", { className: "shares" }, list.flatMap(([name, word]) => [h("dt", {}, say(word)), h("dd", {}, human(rows[name], true))])));
}

function bar() {
  drawBar($("bar"), { map: state.map, scale: state.scale, range: map.range, ink: ink("ink") });
}

function set(name, value) {
  state[name] = value;
  map.set(name, value);
  if (name === "map") overview.mark(`${state.look}/${state.head}`, value);
  toolbar();
  bar();
}

function toolbar() {
  const { look } = open;
  const select = (id, name, options, value, change) =>
    h("label", {}, say(name), h("select", { id, on: { change: (e) => change(e.target.value) } }, options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text))));
  const words = (list) => list.map((each) => [each, say(each)]);
  fill(
    $("toolbar"),
    select("layer", "layer", given.looks.map((each, n) => [n, nameOf(each)]), state.look, (n) => show(Number(n), given.looks[n].heads.includes(state.head) ? state.head : given.looks[n].heads[0])),
    select("head", "head", look.heads.map((n) => [n, String(n)]), state.head, (n) => show(state.look, Number(n))),
    select("scale", "scale", words(SCALES), state.scale, (x) => set("scale", x)),
    select("colours", "colours", words(MAPS), state.map, (x) => set("map", x)),
    h("button", { type: "button", id: "turn", on: { click: () => map.turn() } }, say("turn")),
    h("button", { type: "button", id: "fit", on: { click: () => map.fit() } }, say("fit")),
  ); // prettier-ignore
  fill($("progress"), h("span", { className: "badge exact" }, say("exact")), look.cell === 1 ? say("wholeNote") : say("pageNote", { cell: look.cell }));
}

async function build() {
  document.title = `${given.name} · Regard`;
  const turnLanguage = () => (speak(next(LANGUAGES, spoken())), build());
  const turnTheme = () => {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    (map.changed(false), bar());
  };
  fill($("header"), h("h1", {}, given.name), h("span", { className: "faint" }, say("made", { name: given.from })), h("div", { className: "end" },
    h("button", { type: "button", id: "language", on: { click: turnLanguage } }, say("language")),
    h("button", { type: "button", id: "theme", "aria-label": say("theme"), on: { click: turnTheme } }, "◐"))); // prettier-ignore
  overview = new Overview($("overview"), { choose: show });
  panels = new Panels($("panels"), { look: (i, j) => map.look(i, j, { lock: true }), announce: (text) => ($("live").textContent = text) });
  const shaded = async (i, from, count) => {
    const weights = new Float32Array(count);
    for (const { j, weight } of topOf(i)) if (j >= from && j < from + count) weights[j - from] = weight;
    return weights;
  };
  tokens = new Tokens($("tokens"), { look: (i, j) => map.look(i ?? map.locked?.i ?? 0, j ?? 0, { lock: true }), weights: shaded });
  const heads = [];
  for (const [n, look] of given.looks.entries()) {
    const { ready, rows, cols } = await unpacked(n);
    look.heads.forEach((head, at) => {
      const side = Math.max(rows, cols);
      const mean = new Float32Array(side * side).fill(NaN);
      for (let row = 0; row < rows; row++) mean.set(ready.mean.subarray((at * rows + row) * cols, (at * rows + row + 1) * cols), row * side);
      heads.push({ look: n, head, cells: side, mean, exact: true, what: look.does?.[at] });
    });
  }
  Object.assign(overview, { source: "page", looks: given.looks, map: state.map, current: `${state.look}/${state.head}`, found: { heads, progress: 1 } });
  overview.draw();
  await show(state.look, state.head);
}

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
speak(given.language ?? (navigator.language?.startsWith("zh") ? "zh" : "en"));
build();
