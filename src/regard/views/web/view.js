// Where a map is looked at: from entries of A to pixels and back, zooming and moving. No drawing.
//
// `u` runs to the right and `v` down. Upright, u is the key and v the query; transposed, the other way round.

export const LARGEST = 48; // CSS pixels an entry may take

export class View {
  constructor(qLen, kLen) {
    [this.qLen, this.kLen, this.transposed] = [qLen, kLen, false];
    [this.u, this.v, this.scale] = [0, 0, 1]; // the entry at the upper left corner, and pixels an entry
    [this.width, this.height] = [1, 1]; // of the plot, in CSS pixels
  }

  get uLen() {
    return this.transposed ? this.qLen : this.kLen;
  }

  get vLen() {
    return this.transposed ? this.kLen : this.qLen;
  }

  /** The scale at which all of A is seen. */
  get fitting() {
    return Math.min(this.width / this.uLen, this.height / this.vLen, LARGEST);
  }

  fit() {
    this.scale = this.fitting;
    [this.u, this.v] = [0, 0];
    this.settle();
  }

  /** A new size of the plot: what was in the middle stays there, and what fitted still fits. */
  resize(width, height) {
    const fitted = this.scale <= this.fitting * 1.0001;
    const [u, v] = this.at(this.width / 2, this.height / 2);
    [this.width, this.height] = [Math.max(1, width), Math.max(1, height)];
    if (fitted) this.fit();
    else this.centre(u, v);
  }

  /** Entry coordinates (not rounded) of a point of the plot. */
  at(x, y) {
    return [this.u + x / this.scale, this.v + y / this.scale];
  }

  /** Query and key of a point of the plot, or null beside the matrix. */
  pair(x, y) {
    const [u, v] = this.at(x, y).map(Math.floor);
    if (u < 0 || v < 0 || u >= this.uLen || v >= this.vLen) return null;
    return this.transposed ? { i: u, j: v } : { i: v, j: u };
  }

  /** The point of the plot where an entry begins. */
  point(i, j) {
    const [u, v] = this.transposed ? [i, j] : [j, i];
    return [(u - this.u) * this.scale, (v - this.v) * this.scale];
  }

  zoom(factor, x = this.width / 2, y = this.height / 2) {
    const [u, v] = this.at(x, y);
    this.scale = Math.max(this.fitting, Math.min(LARGEST, this.scale * factor));
    [this.u, this.v] = [u - x / this.scale, v - y / this.scale];
    this.settle();
  }

  move(dx, dy) {
    this.u -= dx / this.scale;
    this.v -= dy / this.scale;
    this.settle();
  }

  centre(u, v) {
    [this.u, this.v] = [u - this.width / 2 / this.scale, v - this.height / 2 / this.scale];
    this.settle();
  }

  /** Bring an entry into sight, moving as little as needed. */
  reveal(i, j) {
    const [x, y] = this.point(i, j);
    const edge = Math.min(40, this.width / 4, this.height / 4);
    const out = (p, size) => (p < edge ? edge - p : p + this.scale > size - edge ? size - edge - p - this.scale : 0);
    this.move(out(x, this.width), out(y, this.height));
  }

  turn() {
    const [u, v] = this.at(this.width / 2, this.height / 2);
    this.transposed = !this.transposed;
    this.scale = Math.max(this.fitting, this.scale);
    this.centre(v, u);
  }

  /** Keep the matrix in the plot: no empty margin on a side that has more to show. */
  settle() {
    const keep = (start, length, size, rest) => {
      const shown = size / this.scale;
      return shown >= length ? (length - shown) * rest : Math.max(0, Math.min(length - shown, start));
    };
    this.u = keep(this.u, this.uLen, this.width, 0.5); // what is small stands in the middle,
    this.v = keep(this.v, this.vLen, this.height, 0); // and at the top
  }

  /** Queries and keys in sight: [i0, i1, j0, j1], ends excluded. */
  get seen() {
    const span = (start, size, length) => [Math.max(0, Math.floor(start)), Math.min(length, Math.ceil(start + size / this.scale))];
    const [u, v] = [span(this.u, this.width, this.uLen), span(this.v, this.height, this.vLen)];
    return this.transposed ? [...u, ...v] : [...v, ...u];
  }

  get state() {
    return { u: this.u, v: this.v, scale: this.scale, transposed: this.transposed };
  }

  set state({ u, v, scale, transposed }) {
    this.transposed = Boolean(transposed);
    this.scale = Math.max(this.fitting, Math.min(LARGEST, scale));
    [this.u, this.v] = [u, v];
    this.settle();
  }
}
