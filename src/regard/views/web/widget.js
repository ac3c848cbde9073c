// The map in a notebook: the kernel is asked for its numbers, by messages.

import { MAPS, SCALES, drawBar, human } from "./colour.js";
import { fill, h } from "./dom.js";
import { AttentionMap } from "./map.js";
import { say, speak } from "./words.js";

/** Questions to the kernel and their answers, each with a number. */
function asking(model) {
  const waiting = new Map();
  let count = 0;
  model.on("msg:custom", (told, buffers) => {
    const { done, fail } = waiting.get(told.id) ?? {};
    waiting.delete(told.id);
    if (!done) return;
    if (told.error) fail(new Error(told.error));
    else done({ ...told, floats: (buffers ?? []).map((b) => new Float32Array((b.buffer ?? b).slice(b.byteOffset ?? 0, (b.byteOffset ?? 0) + b.byteLength))) });
  });
  return (what, more = {}) =>
    new Promise((done, fail) => {
      waiting.set(++count, { done, fail });
      model.send({ id: count, what, ...more });
    });
}

async function render({ model, el }) {
  speak(model.get("language"));
  const ask = asking(model);
  const about = model.get("about");
  const state = { head: 0, scale: "linear", map: "viridis", hideFirst: false };
  const [canvas, bar, note] = [h("canvas", { tabIndex: 0, role: "application", "aria-label": "A" }), h("canvas", { className: "bar" }), h("div", { className: "note", role: "status" })];
  const tools = h("div", { className: "tools" });
  el.classList.add("regard-widget");
  fill(el, tools, canvas, h("div", { className: "foot" }, bar, note));
  let map = null;
  const label = (side, n) => about.labels?.[side]?.[n] ?? String(n);

  function open() {
    map?.close();
    const head = state.head;
    const provider = {
      qLen: about.q_len, kLen: about.k_len, levels: about.levels, tile: about.tile, label,
      fetchTile: async ({ what, cell, row, col }) => {
        const { rows, cols, exact, floats } = await ask("tile", { head, of: what, cell, row, col });
        return { rows, cols, exact, mean: floats[0], max: floats[1], first: floats[2] ? { mean: floats[2], max: floats[3] } : null };
      },
      rowPeaks: async (cell) => {
        const { floats, exact } = await ask("peaks", { head, cell });
        return { all: floats[0], rest: floats[1], exact };
      },
    }; // prettier-ignore
    map = new AttentionMap(canvas, provider, { scale: state.scale, map: state.map, hideFirst: state.hideFirst, axes: { q: say("query"), k: say("key") } });
    map.addEventListener("range", marks);
    map.addEventListener("hover", ({ detail }) => point(detail ?? map.locked));
    map.addEventListener("lock", ({ detail }) => point(detail));
    marks();
    el.regardMap = map;
    finish(map, head);
  }

  /** Have the kernel take in row after row until no tile is a sample; what is shown follows once a second. */
  async function finish(shown, head) {
    let last = performance.now();
    for (let exact = about.levels.length === 1; !exact && map === shown && !shown.closed; ) {
      let progress;
      ({ exact, progress } = await ask("step", { head }));
      if (!exact && performance.now() - last < 1000) continue;
      last = performance.now();
      note.textContent = exact ? say("exactNote") : say("sampleNote", { percent: Math.floor(100 * progress) });
      shown.refresh();
    }
  }

  const marks = () => map && drawBar(bar, { map: state.map, scale: state.scale, range: map.range, ink: getComputedStyle(el).getPropertyValue("--ink") });

  async function point(pair) {
    if (!pair) return;
    const told = await ask("pair", { head: state.head, ...pair });
    note.textContent = say("readout", { ...pair, q: label("q", pair.i), k: label("k", pair.j), weight: human(told.weight) });
    note.dataset.value = told.weight;
  }

  function set(name, value) {
    state[name] = value;
    map.set(name, value);
    marks();
  }

  const select = (name, options, value, change) =>
    h("label", {}, `${say(name)} `, h("select", { on: { change: (e) => change(e.target.value) } }, options.map(([key, words]) => h("option", { value: key, selected: key === value }, words))));
  const words = (list) => list.map((each) => [each, say(each)]);
  fill(
    tools,
    about.heads.length > 1 ? select("head", about.heads.map((name, n) => [n, name]), 0, (n) => ((state.head = Number(n)), open())) : null,
    select("scale", words(SCALES), state.scale, (x) => set("scale", x)),
    select("colours", words(MAPS), state.map, (x) => set("map", x)),
    h("label", {}, h("input", { type: "checkbox", on: { change: (e) => set("hideFirst", e.target.checked) } }), ` ${say("hideFirst")}`),
    h("button", { type: "button", on: { click: () => map.turn() } }, say("turn")),
    h("button", { type: "button", on: { click: () => map.fit() } }, say("fit")),
  ); // prettier-ignore
  open();
  return () => map?.close();
}

export default { render };
