// Two-dimensional positions: the cell of the query, the cell of the key, and the displacement between them.
//
// Left the grid, shaded by the weights of the query (flat, or two planes in perspective: queries above, keys below).
// Where tokens are patches of an image, the image lies under the weights. Right the table of displacements, shaded by
// the mass that lies on each. Pointing at either moves the cursor of A. A large grid comes in squares of several cells.

import { human, palette } from "./colour.js";
import { fill, h, ink, sharp } from "./dom.js";
import { ask, json, weights as weightsOf } from "./server.js";
import { say } from "./words.js";

export const PICTURES = ["both", "weights", "image"];
const LINES = 6; // CSS pixels a cell needs before lines are drawn around it
const SMALL = 7; // and below which it is marked with a ring

export class GridView {
  constructor(element, { look, announce, deep = false, picture = "both", set = () => {} }) {
    Object.assign(this, { look, announce, deep, picture, set });
    this.cells = h("canvas", { tabIndex: 0, role: "img", id: "grid-cells", "aria-label": say("gridNote") });
    this.table = h("canvas", { tabIndex: 0, role: "img", id: "grid-deltas", "aria-label": say("deltaTable") });
    this.note = h("p", { className: "faint" });
    this.button = h("button", { type: "button", id: "grid-deep", on: { click: () => this.flip() } });
    this.choice = h("select", { id: "grid-picture", "aria-label": say("picture"), on: { change: (event) => this.choose(event.target.value) } });
    this.choice.append(...PICTURES.map((each) => h("option", { value: each, selected: each === picture }, say(`picture_${each}`))));
    fill(element, h("div", { className: "gridview" }, this.cells, this.table), h("div", { className: "grid-note" }, this.button, this.choice, this.note));
    this.watcher = new ResizeObserver(() => this.draw());
    for (const canvas of [this.cells, this.table]) this.watcher.observe(canvas);
    this.cells.addEventListener("pointermove", (event) => this.point(event));
    this.cells.addEventListener("click", (event) => this.point(event, true));
    this.cells.addEventListener("keydown", (event) => this.press(event));
    this.table.addEventListener("pointermove", (event) => this.pointDelta(event));
    this.table.addEventListener("pointerleave", () => ((this.delta = null), this.draw()));
    this.table.addEventListener("click", (event) => this.pointDelta(event, true));
  }

  close() {
    this.closed = true;
    this.watcher.disconnect();
  }

  flip() {
    this.deep = !this.deep;
    this.set("deep", this.deep);
    this.draw();
  }

  choose(picture) {
    this.picture = picture;
    this.set("picture", picture);
    this.draw();
  }

  async open(at, geometry, map) {
    [this.at, this.geometry, this.colours] = [at, geometry, palette(map)];
    [this.h, this.w] = geometry.k;
    this.places = {
      q: { shape: geometry.q, first: (geometry.q_unplaced ?? geometry.unplaced ?? 0) - (geometry.q_start ?? 0) },
      k: { shape: geometry.k, first: (geometry.unplaced ?? 0) - (geometry.k_start ?? 0) },
    };
    this.choice.hidden = !geometry.image;
    if (geometry.image && !this.image) {
      this.image = imageOf(await (await ask(`/api/image/${at.split("/").slice(0, 2).join("/")}`)).arrayBuffer());
      this.draw();
    }
    const profile = await json(`/api/profile/${at}`);
    [this.profile, this.exact] = [profile.grid, profile.exact];
    this.draw();
    if (!this.exact && !this.closed) this.timer = setTimeout(() => this.again(map), 2000);
  }

  /** The table of displacements once more, while it is a sample. */
  again(map) {
    if (!this.closed) this.open(this.at, this.geometry, map).catch((error) => this.announce(say("failed", { error: error.message }), true));
  }

  async show(pair) {
    this.pair = pair;
    if (!pair) return this.draw();
    const row = `${this.at}/${pair.i}`;
    try {
      if (this.row !== row) {
        const found = await json(`/api/grid/${this.at}?i=${pair.i}`);
        if (this.pair !== pair) return;
        [this.row, this.weights, this.pool, this.alone] = [row, found.weights, found.pool ?? 1, found.alone];
      }
      this.weight = this.pool === 1 ? this.weightOf(pair.j) : (await weightsOf(this.at, pair.i, pair.j, 1))[0];
    } catch (error) {
      return this.announce(say("failed", { error: error.message }), true);
    }
    if (this.pair === pair) this.draw();
  }

  /** The weight of the query looked at on a key, where every cell has come by itself. */
  weightOf(j) {
    const cell = this.cellOf(j, "k");
    return cell ? this.weights[cell[0] * this.w + cell[1]] : this.alone[j];
  }

  /** The cell of a token, or null for one that has no place (a class token). */
  cellOf(n, side) {
    const { shape, first } = this.places[side];
    const m = n - first;
    return m < 0 || m >= shape[0] * shape[1] ? null : [Math.floor(m / shape[1]), m % shape[1]];
  }

  /** From rows and columns of a plane (0: the only one or the lower, 1: the upper) to the canvas: X = a col + c row + e. */
  plane(upper) {
    const { left, top, size } = this.box;
    const [w, h] = [this.w * size, this.h * size];
    const flat = { a: size, b: 0, c: 0, d: size, e: left, f: top };
    const deep = { a: 0.82 * size, b: 0.1 * size, c: -0.38 * size, d: 0.4 * size, e: left + 0.09 * w + 0.19 * h, f: top + 0.48 * h - 0.05 * w - (upper ? 0.4 * h : 0) };
    const found = this.deep ? deep : flat;
    if (!upper) return found;
    const [down, across] = [this.h / this.places.q.shape[0], this.w / this.places.q.shape[1]]; // queries on a grid of their own
    return { ...found, a: found.a * across, b: found.b * across, c: found.c * down, d: found.d * down };
  }

  spot({ a, b, c, d, e, f }, row, col) {
    return [a * col + c * row + e, b * col + d * row + f];
  }

  /** The cell of a plane at a point of the canvas, or null. */
  cellAt(upper, x, y) {
    const { a, b, c, d, e, f } = this.plane(upper);
    const turn = a * d - b * c;
    const [col, row] = [(d * (x - e) - c * (y - f)) / turn, (a * (y - f) - b * (x - e)) / turn].map(Math.floor);
    const [high, wide] = this.places[upper ? "q" : "k"].shape;
    return row < 0 || col < 0 || row >= high || col >= wide ? null : [row, col];
  }

  draw() {
    if (!this.geometry || this.closed) return;
    this.button.textContent = say(this.deep ? "flat" : "perspective");
    const { pen, width, height } = sharp(this.cells);
    const size = Math.min((width - 20) / this.w, (height - 20) / this.h);
    this.box = { size, left: (width - size * this.w) / 2, top: (height - size * this.h) / 2 };
    pen.clearRect(0, 0, width, height);
    const image = this.image && this.picture !== "weights" ? this.image : null;
    const [lower, upper] = [this.plane(false), this.plane(true)];
    const shades = this.weights && this.picture !== "image" ? shaded(this.weights, this.h, this.w, this.pool, this.colours, Boolean(image)) : null;
    this.lay(pen, lower, this.places.k.shape, image, shades);
    if (!image && !shades) this.lay(pen, lower, this.places.k.shape, null, shaded(new Array(this.h * this.w).fill(0), this.h, this.w, 1, this.colours, false));
    if (this.deep) this.lay(pen, upper, this.places.q.shape, this.image, null, 0.6);
    const [query, key] = this.pair ? [this.cellOf(this.pair.i, "q"), this.cellOf(this.pair.j, "k")] : [null, null];
    if (query) this.mark(pen, this.deep ? upper : this.plane(true), query, ink("query"), this.deep);
    if (key) this.mark(pen, lower, key, ink("key"));
    if (query && key) this.arrow(pen, this.spot(upper, query[0] + 0.5, query[1] + 0.5), this.spot(lower, key[0] + 0.5, key[1] + 0.5));
    this.drawTable(query, key);
    this.tell(query, key);
  }

  /** An image and shades on a plane, with lines around the cells where there is room. */
  lay(pen, plane, [high, wide], image, shades, alpha = 1) {
    const { a, b, c, d, e, f } = plane;
    pen.save();
    pen.globalAlpha = alpha;
    pen.transform(a, b, c, d, e, f); // now one unit is one cell
    pen.imageSmoothingEnabled = false;
    if (image) pen.drawImage(image, 0, 0, wide, high);
    if (shades) pen.drawImage(shades.canvas, 0, 0, shades.wide, shades.high);
    pen.restore();
    pen.save();
    pen.lineWidth = 1;
    pen.strokeStyle = image || !shades ? ink("line") : ink("paper");
    pen.globalAlpha = image ? 0.35 : 1;
    const rule = (row0, col0, row1, col1) => (pen.moveTo(...this.spot(plane, row0, col0)), pen.lineTo(...this.spot(plane, row1, col1)));
    pen.beginPath();
    const fine = this.box.size >= LINES;
    for (let row = 0; row <= high; row += fine ? 1 : high) rule(row, 0, row, wide);
    for (let col = 0; col <= wide; col += fine ? 1 : wide) rule(0, col, high, col);
    pen.stroke();
    pen.restore();
  }

  mark(pen, plane, [row, col], colour, filled = false) {
    pen.beginPath();
    [pen.strokeStyle, pen.lineWidth] = [colour, 3];
    if (this.box.size < SMALL) pen.arc(...this.spot(plane, row + 0.5, col + 0.5), SMALL, 0, 2 * Math.PI);
    else [[0, 0], [0, 1], [1, 1], [1, 0]].forEach(([down, right], n) => pen[n ? "lineTo" : "moveTo"](...this.spot(plane, row + down, col + right))); // prettier-ignore
    pen.closePath();
    if (filled) [pen.fillStyle, pen.globalAlpha] = [colour, this.image ? 0.45 : 1];
    if (filled) pen.fill();
    pen.globalAlpha = 1;
    pen.stroke();
  }

  arrow(pen, [x0, y0], [x1, y1]) {
    if (Math.hypot(x1 - x0, y1 - y0) < 2) return;
    const turn = Math.atan2(y1 - y0, x1 - x0);
    [pen.strokeStyle, pen.fillStyle, pen.lineWidth] = [ink("delta"), ink("delta"), 2.5];
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x1, y1);
    for (const side of [2.6, -2.6]) pen.lineTo(x1 + 11 * Math.cos(turn + side), y1 + 11 * Math.sin(turn + side));
    pen.fill();
  }

  /** Where a displacement stands in the table: [row, column]. */
  binOf([down, right]) {
    const pool = this.profile.pool ?? 1;
    return [Math.floor((down + this.h - 1) / pool), Math.floor((right + this.w - 1) / pool)];
  }

  massAt(delta) {
    if (!this.profile || !delta) return null;
    const [row, col] = this.binOf(delta);
    return this.profile.mass[row * this.profile.shape[1] + col] ?? null;
  }

  drawTable(query, key) {
    const { pen, width, height } = sharp(this.table);
    pen.clearRect(0, 0, width, height);
    if (!this.profile) return;
    const [rows, cols] = this.profile.shape;
    const size = Math.min((width - 20) / cols, (height - 44) / rows);
    const [left, upper] = [(width - size * cols) / 2, 30];
    this.deltas = { left, upper, size };
    pen.fillStyle = ink("faint");
    pen.font = "12px system-ui, 'Noto Sans CJK SC', 'WenQuanYi Zen Hei', sans-serif";
    const title = this.exact ? say("deltaTable") : `${say("deltaTable")} · ${say("sample")}`;
    pen.fillText(title, Math.max(2, Math.min(left, width - pen.measureText(title).width - 2)), 18);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(shaded(this.profile.mass, rows, cols, 1, this.colours, false).canvas, left, upper, size * cols, size * rows);
    const frame = (delta, colour, thick) => {
      const [row, col] = this.binOf(delta);
      [pen.strokeStyle, pen.lineWidth] = [colour, thick];
      const grown = Math.max(0, (SMALL - size) / 2);
      pen.strokeRect(left + col * size - grown, upper + row * size - grown, size + 2 * grown, size + 2 * grown);
    };
    frame([0, 0], "rgb(255 255 255 / .75)", 1); // no displacement: the middle
    if (this.delta) frame(this.delta, ink("ink"), 1.5);
    if (!query || !key) return;
    frame([query[0] - key[0], query[1] - key[1]], ink("delta"), 3);
  }

  /** The read-out: where query and key are, and the numbers of both pictures. */
  tell(query, key) {
    const at = (cell) => `(${cell[0]}, ${cell[1]})`;
    const said = [say("gridNote")];
    const number = (id, x) => h("b", { id, className: "number", data: { value: x ?? "" } }, human(x));
    if (this.delta) said.push(` δ = ${at(this.delta)}: ${say("massAt")} `, number("grid-mass", this.massAt(this.delta)));
    else if (query && key) {
      const delta = [query[0] - key[0], query[1] - key[1]];
      said.push(" ", h("span", { className: "q" }, `${say("query")} ${at(query)}`), ", ", h("span", { className: "k" }, `${say("key")} ${at(key)}`));
      said.push(`, ${say("delta")} δ = ${at(delta)}; ${say("weightIs")} `, number("grid-weight", this.weight), `, ${say("massAt")} `, number("grid-mass", this.massAt(delta)));
    } else if (this.pair) said.push(` ${say("noPlace")} ${say("weightIs")} `, number("grid-weight", this.weight));
    fill(this.note, said);
    this.cells.setAttribute("aria-label", this.note.textContent);
  }

  point(event, lock = false) {
    if (!this.box) return;
    const box = this.cells.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const key = this.cellAt(false, x, y);
    const query = this.deep ? this.cellAt(true, x, y) : null;
    const number = (cell, side) => this.places[side].first + cell[0] * this.places[side].shape[1] + cell[1];
    // flat, moving chooses the key and clicking makes the cell the query; in perspective each has a plane of its own
    if (key && !this.deep && lock) return this.look(number(key, "k"), null);
    if (key) return this.look(null, number(key, "k"), { lock });
    if (query) this.look(number(query, "q"), null, { lock });
  }

  /** A displacement of the table: its mass, and the key that stands so to the query looked at. */
  pointDelta(event, choose = false) {
    if (!this.deltas || !this.profile) return;
    const box = this.table.getBoundingClientRect();
    const { left, upper, size } = this.deltas;
    const [col, row] = [(event.clientX - box.left - left) / size, (event.clientY - box.top - upper) / size].map(Math.floor);
    const [rows, cols] = this.profile.shape;
    const pool = this.profile.pool ?? 1;
    const inside = row >= 0 && col >= 0 && row < rows && col < cols;
    this.delta = inside ? [row * pool - this.h + 1, col * pool - this.w + 1] : null;
    const query = this.pair && this.cellOf(this.pair.i, "q");
    const key = query && this.delta ? [query[0] - this.delta[0], query[1] - this.delta[1]] : null;
    if (choose && key && key.every((n, axis) => n >= 0 && n < this.places.k.shape[axis])) {
      this.delta = null;
      return this.look(null, this.places.k.first + key[0] * this.w + key[1]);
    }
    this.draw();
  }

  press(event) {
    if (!this.pair) return;
    const side = event.shiftKey ? "i" : "j"; // with shift the query moves
    const places = event.shiftKey ? "q" : "k";
    const wide = this.places[places].shape[1];
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide };
    if (!(event.key in steps)) return;
    event.preventDefault();
    event.stopPropagation();
    const n = this.pair[side] + steps[event.key];
    if (this.cellOf(n, places) === null) return;
    this.look(side === "i" ? n : null, side === "j" ? n : null);
  }
}

/** Numbers as a small picture, a pixel a square of `pool` x `pool` cells; over an image, strong where they are large. */
function shaded(values, high, wide, pool, colours, over) {
  const [rows, cols] = [Math.ceil(high / pool), Math.ceil(wide / pool)];
  const canvas = new OffscreenCanvas(cols, rows);
  const pen = canvas.getContext("2d");
  const picture = pen.createImageData(cols, rows);
  const pixels = new Uint32Array(picture.data.buffer);
  const top = values.reduce((most, x) => (x > most ? x : most), 1e-12);
  values.forEach((x, n) => {
    const share = Math.max(0, Math.min(1, x / top));
    const colour = colours[Math.round(255 * share)];
    pixels[n] = over ? (colour & 0xffffff) | (Math.round(217 * Math.sqrt(share)) << 24) : colour;
  });
  pen.putImageData(picture, 0, 0);
  return { canvas, high: rows * pool, wide: cols * pool };
}

/** An image from its bytes: rows, columns, channels, then the channels of each pixel. */
function imageOf(buffer) {
  const [rows, cols, channels] = new Uint32Array(buffer, 0, 3);
  const bytes = new Uint8Array(buffer, 12);
  const canvas = new OffscreenCanvas(cols, rows);
  const pen = canvas.getContext("2d");
  const picture = pen.createImageData(cols, rows);
  for (let n = 0; n < rows * cols; n++) {
    for (let part = 0; part < 3; part++) picture.data[4 * n + part] = bytes[channels * n + (channels === 1 ? 0 : part)];
    picture.data[4 * n + 3] = 255;
  }
  pen.putImageData(picture, 0, 0);
  return canvas;
}
