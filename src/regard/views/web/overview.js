// Every head small, with what it does: sampled rows first, exact when the server has them.

import { palette } from "./colour.js";
import { fill, h } from "./dom.js";
import { json } from "./server.js";
import { say } from "./words.js";

export class Overview {
  constructor(element, { choose }) {
    [this.element, this.choose] = [element, choose];
  }

  async show(source, looks, current, map) {
    [this.source, this.looks, this.map] = [source, looks, map];
    this.current = current;
    clearTimeout(this.timer);
    const found = await json(`/api/overview/${source}`);
    if (this.source !== source) return;
    this.found = found;
    this.draw();
    if (found.heads.some((head) => !head.exact)) this.timer = setTimeout(() => this.source === source && this.show(source, looks, this.current, this.map), 900);
  }

  mark(current, map) {
    const recolour = map !== this.map;
    [this.current, this.map] = [current, map];
    if (recolour && this.found) this.draw();
    for (const thumb of this.element.querySelectorAll(".thumb")) thumb.setAttribute("aria-current", String(thumb.dataset.at === current));
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
    fill(this.element, ...shown);
  }

  thumb(head, look) {
    const canvas = h("canvas", { width: head.cells, height: head.cells });
    const values = typeof head.mean === "string" ? floats(head.mean) : head.mean;
    paint(canvas, values, head.cells, palette(this.map));
    const at = `${head.look}/${head.head}`;
    const does = head.what ? say(`does_${head.what.replaceAll(" ", "_")}`) : "";
    const name = `${nameOf(look)}, ${say("head")} ${head.head}${does ? `: ${does}` : ""}`;
    return h("button", { type: "button", className: "thumb", title: name, "aria-label": name, "aria-current": String(at === this.current), data: { at },
      on: { click: () => this.choose(head.look, head.head) } }, canvas, h("span", { className: "does" }, `${head.head} ${does}`)); // prettier-ignore
  }
}

export function nameOf(look) {
  const where = [look.stack, look.kind === "cross" ? "cross" : null].filter(Boolean).map((word) => say(word));
  return [...where, `${say("layer")} ${look.layer}`].join(" · ");
}

function floats(text) {
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
