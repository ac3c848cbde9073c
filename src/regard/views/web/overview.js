// Every head small, with what it does: sampled rows first, exact when the server has them.

import { human, palette } from "./colour.js";
import { fill, h } from "./dom.js";
import { json } from "./server.js";
import { say } from "./words.js";

export class Overview {
  constructor(element, { choose }) {
    [this.element, this.choose] = [element, choose];
  }

  /** Ask for every head of a source, and again, less and less often, until all are exact. */
  async show(source, looks, current, map, wait = 900) {
    [this.source, this.looks, this.map] = [source, looks, map];
    this.current = current;
    clearTimeout(this.timer);
    const found = await json(`/api/overview/${source}`);
    if (this.source !== source) return;
    const first = this.found?.source !== source;
    this.found = { ...found, source };
    this.draw();
    if (first) this.reveal();
    if (found.more) this.timer = setTimeout(() => this.source === source && this.show(source, looks, this.current, this.map, Math.min(6000, 1.3 * wait)), wait);
  }

  mark(current, map) {
    const [recolour, moved] = [map !== this.map, current !== this.current];
    [this.current, this.map] = [current, map];
    if (recolour && this.found) this.draw();
    for (const thumb of this.element.querySelectorAll(".thumb")) thumb.setAttribute("aria-current", String(thumb.dataset.at === current));
    if (moved) this.reveal();
  }

  /** Bring the head that is shown large into sight, where the list scrolls by itself. */
  reveal() {
    const [thumb, list] = [this.element.querySelector(".thumb[aria-current=true]"), this.element];
    if (!thumb || list.scrollHeight <= list.clientHeight) return;
    const [inside, outside] = [thumb.getBoundingClientRect(), list.getBoundingClientRect()];
    if (inside.top < outside.top || inside.bottom > outside.bottom) list.scrollTop += inside.top - outside.top - list.clientHeight / 3;
  }

  /** The numbers of a small picture, row by row: for tests and for the curious. */
  values(at) {
    const head = this.found?.heads.find((each) => `${each.look}/${each.head}` === at);
    return head ? { cells: head.cells, mean: Array.from(floats(head.mean)), exact: head.exact, stats: head.stats } : null;
  }

  draw() {
    const groups = new Map();
    for (const head of this.found.heads) groups.set(head.look, [...(groups.get(head.look) ?? []), head]);
    const exact = this.found.heads.every((head) => head.exact);
    const percent = Math.round(100 * this.found.progress);
    const shown = [h("h2", {}, `${say("overview")} `, h("span", { className: `badge ${exact ? "exact" : "sample"}` }, exact ? say("exact") : `${say("sample")} ${percent} %`))];
    for (const [index, heads] of groups) {
      const look = this.looks[index];
      shown.push(h("div", { className: "layer" }, nameOf(look)), h("div", { className: "heads" }, heads.map((head) => this.thumb(head, look))));
    }
    const focused = this.element.contains(document.activeElement) ? document.activeElement.dataset.at : null;
    fill(this.element, ...shown);
    if (focused) this.element.querySelector(`.thumb[data-at='${focused}']`)?.focus({ preventScroll: true });
  }

  thumb(head, look) {
    const canvas = h("canvas", { width: head.cells, height: head.cells });
    const values = floats(head.mean); // of an exported page they are numbers already
    paint(canvas, values, head.cells, palette(this.map));
    const at = `${head.look}/${head.head}`;
    const does = head.what ? say(`does_${head.what.replaceAll(" ", "_")}`) : "";
    const sampled = head.what && head.of_rows < 1; // what it does is told from some of its rows so far
    const note = sampled ? ` (${say("sampleDoes", { percent: human(100 * head.of_rows) })})` : "";
    const name = `${nameOf(look)}, ${say("head")} ${head.head}${does ? `: ${does}${note}` : ""}`;
    return h("button", { type: "button", className: "thumb", title: name, "aria-label": name, "aria-current": String(at === this.current), data: { at },
      on: { click: () => this.choose(head.look, head.head) } }, canvas, h("span", { className: "does" }, `${head.head} ${sampled ? "≈ " : ""}${does}`)); // prettier-ignore
  }
}

export function nameOf(look) {
  const where = [look.stack, look.kind === "cross" ? "cross" : null].filter(Boolean).map((word) => say(word));
  return [...where, `${say("layer")} ${look.layer}`].join(" · ");
}

function floats(text) {
  if (typeof text !== "string") return text;
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

/** Each row by itself, so that every head shows its shape. */
function paint(canvas, values, cells, colours) {
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(cells, cells);
  const pixels = new Uint32Array(image.data.buffer);
  for (let row = 0; row < cells; row++) {
    const line = values.subarray(row * cells, (row + 1) * cells);
    const top = line.reduce((most, x) => (x > most ? x : most), 0);
    line.forEach((x, n) => {
      if (!Number.isNaN(x)) pixels[row * cells + n] = colours[top ? Math.round((255 * x) / top) : 0];
    });
  }
  pen.putImageData(image, 0, 0);
}
