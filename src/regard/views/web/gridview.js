// Two-dimensional positions: the cell of the query, the cell of the key, and the displacement between them.
//
// Left the grid, shaded by the weights of the query (flat, or two planes in perspective: queries above, keys below).
// Right the table of displacements, shaded by the mass that lies on each. Pointing at either moves the cursor of A.

import { css, human, palette } from "./colour.js";
import { fill, h, ink, sharp } from "./dom.js";
import { json } from "./server.js";
import { say } from "./words.js";

export class GridView {
  constructor(element, { look, announce }) {
    [this.look, this.announce, this.deep] = [look, announce, false];
    this.cells = h("canvas", { tabIndex: 0, role: "img", id: "grid-cells" });
    this.table = h("canvas", { tabIndex: 0, role: "img", id: "grid-deltas" });
    this.note = h("p", { className: "faint" });
    const flip = () => ((this.deep = !this.deep), (this.button.textContent = say(this.deep ? "flat" : "perspective")), this.draw());
    this.button = h("button", { type: "button", on: { click: flip } }, say("perspective"));
    fill(element, h("div", { className: "gridview" }, this.cells, this.table), h("div", {}, this.button, " ", this.note));
    this.watcher = new ResizeObserver(() => this.draw());
    for (const canvas of [this.cells, this.table]) this.watcher.observe(canvas);
    this.cells.addEventListener("pointermove", (event) => this.point(event));
    this.cells.addEventListener("click", (event) => this.point(event, true));
    this.cells.addEventListener("keydown", (event) => this.press(event));
    this.table.addEventListener("click", (event) => this.pointDelta(event));
  }

  close() {
    this.watcher.disconnect();
  }

  async open(at, geometry, map) {
    [this.at, this.geometry, this.colours] = [at, geometry, palette(map)];
    [this.h, this.w] = geometry.k;
    this.unplaced = geometry.unplaced ?? 0;
    this.profile = (await json(`/api/profile/${at}`)).grid;
    this.draw();
  }

  async show(pair) {
    this.pair = pair;
    if (!pair) return this.draw();
    if (this.row !== `${this.at}/${pair.i}`) {
      const row = `${this.at}/${pair.i}`;
      const found = await json(`/api/grid/${this.at}?i=${pair.i}`);
      if (this.pair !== pair) return;
      [this.row, this.weights] = [row, found.weights];
    }
    this.draw();
  }

  /** The cell of a token, or null for one that has no place (a class token). */
  cellOf(n) {
    const m = n - this.unplaced;
    return m < 0 || m >= this.h * this.w ? null : [Math.floor(m / this.w), m % this.w];
  }

  /** From a cell of a plane (0: the only one or the lower, 1: the upper) to the canvas. */
  spot(row, col, plane = 0) {
    const { left, top, size } = this.box;
    if (!this.deep) return [left + col * size, top + row * size];
    const [x, y] = [(col - this.w / 2) * size, (row - this.h / 2) * size];
    return [left + (this.w * size) / 2 + x * 0.82 - y * 0.38, top + this.h * size * 0.68 + y * 0.4 + x * 0.1 - plane * this.h * size * 0.4];
  }

  draw() {
    if (!this.geometry) return;
    const { pen, width, height } = sharp(this.cells);
    const size = Math.min((width - 20) / this.w, (height - 20) / this.h);
    this.box = { size, left: (width - size * this.w) / 2, top: (height - size * this.h) / 2 };
    pen.clearRect(0, 0, width, height);
    const weights = this.weights ?? [];
    const top = weights.reduce((most, x) => (x > most ? x : most), 1e-12);
    const paint = (row, col, plane, fillStyle, stroke, thick = 1) => {
      const corners = [[0, 0], [0, 1], [1, 1], [1, 0]].map(([a, b]) => this.spot(row + a, col + b, plane)); // prettier-ignore
      pen.beginPath();
      corners.forEach(([x, y], n) => (n ? pen.lineTo(x, y) : pen.moveTo(x, y)));
      pen.closePath();
      if (fillStyle) [pen.fillStyle, pen.globalAlpha] = [fillStyle, plane ? 0.55 : 1];
      if (fillStyle) pen.fill();
      pen.globalAlpha = 1;
      [pen.strokeStyle, pen.lineWidth] = [stroke, thick];
      pen.stroke();
    };
    for (let row = 0; row < this.h; row++)
      for (let col = 0; col < this.w; col++) paint(row, col, 0, css(this.colours, (weights[row * this.w + col] ?? 0) / top), ink("paper"));
    if (this.deep) for (let row = 0; row < this.h; row++) for (let col = 0; col < this.w; col++) paint(row, col, 1, null, ink("line"));
    const [query, key] = this.pair ? [this.cellOf(this.pair.i), this.cellOf(this.pair.j)] : [null, null];
    if (query) paint(...query, this.deep ? 1 : 0, this.deep ? ink("query") : null, ink("query"), 3);
    if (key) paint(...key, 0, null, ink("key"), 3);
    if (query && key) this.arrow(pen, this.spot(query[0] + 0.5, query[1] + 0.5, this.deep ? 1 : 0), this.spot(key[0] + 0.5, key[1] + 0.5, 0));
    this.drawTable(query, key);
    const delta = query && key ? ` ${say("delta")} δ = (${query[0] - key[0]}, ${query[1] - key[1]})` : "";
    this.note.textContent = say("gridNote") + delta;
    this.cells.setAttribute("aria-label", this.note.textContent);
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

  drawTable(query, key) {
    const { pen, width, height } = sharp(this.table);
    pen.clearRect(0, 0, width, height);
    if (!this.profile) return;
    const [rows, cols] = this.profile.shape;
    const size = Math.min((width - 20) / cols, (height - 44) / rows);
    const [left, upper] = [(width - size * cols) / 2, 30];
    this.deltas = { left, upper, size, rows, cols };
    pen.fillStyle = ink("faint");
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(say("deltaTable"), left, 18);
    const top = this.profile.mass.reduce((most, x) => (x > most ? x : most), 1e-12);
    this.profile.mass.forEach((x, n) => {
      pen.fillStyle = css(this.colours, x / top);
      pen.fillRect(left + (n % cols) * size, upper + Math.floor(n / cols) * size, size + 0.4, size + 0.4);
    });
    if (!query || !key) return;
    const [a, b] = [query[0] - key[0] + (rows - 1) / 2, query[1] - key[1] + (cols - 1) / 2];
    [pen.strokeStyle, pen.lineWidth] = [ink("delta"), 3];
    pen.strokeRect(left + b * size, upper + a * size, size, size);
    const mass = this.profile.mass[a * cols + b];
    pen.fillStyle = ink("ink");
    pen.fillText(human(mass), left + b * size, upper + a * size - 5);
  }

  point(event, lock = false) {
    if (!this.box || this.deep) return;
    const box = this.cells.getBoundingClientRect();
    const [col, row] = [(event.clientX - box.left - this.box.left) / this.box.size, (event.clientY - box.top - this.box.top) / this.box.size].map(Math.floor);
    if (row < 0 || col < 0 || row >= this.h || col >= this.w) return;
    const n = this.unplaced + row * this.w + col;
    // moving chooses the key, clicking makes the cell the query
    if (lock) this.look(n, null);
    else this.look(null, n, { lock: false });
  }

  /** A displacement of the table: the key that stands so to the query looked at. */
  pointDelta(event) {
    const query = this.pair && this.cellOf(this.pair.i);
    if (!query || !this.deltas) return;
    const box = this.table.getBoundingClientRect();
    const { left, upper, size, rows, cols } = this.deltas;
    const [b, a] = [(event.clientX - box.left - left) / size, (event.clientY - box.top - upper) / size].map(Math.floor);
    const [row, col] = [query[0] - (a - (rows - 1) / 2), query[1] - (b - (cols - 1) / 2)];
    if (row >= 0 && col >= 0 && row < this.h && col < this.w) this.look(null, this.unplaced + row * this.w + col);
  }

  press(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.w, ArrowDown: this.w };
    if (!(event.key in steps) || !this.pair) return;
    event.preventDefault();
    event.stopPropagation();
    const side = event.shiftKey ? "i" : "j"; // with shift the query moves
    const n = this.pair[side] + steps[event.key];
    if (this.cellOf(n) === null) return;
    this.look(side === "i" ? n : null, side === "j" ? n : null);
  }
}
