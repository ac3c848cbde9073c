// The map: A of any size on a canvas. Numbers come as tiles and are coloured here; softmax is never done here.
//
// A provider gives the numbers: { qLen, kLen, levels, tile, fetchTile(key, signal), rowPeaks(cell, signal), label(side, n) }.
//   levels     cell sizes, from 1 up: a cell of size c is c x c entries
//   fetchTile  {what, cell, row, col} to {rows, cols, mean, max, first, exact}: float32, NaN where nothing is visible;
//              `first` {mean, max} is the first column of cells without key 0, in tiles of column 0
//   rowPeaks   {all, rest}: the largest weight of each row of cells, with key 0 and without
// The page's server, a notebook's kernel and an exported file are three providers of one map.

import { brief, palette, shareOf } from "./colour.js";
import { LARGEST, View } from "./view.js";

const KEPT = 160; // tiles held
const READABLE = 13; // CSS pixels an entry needs before tokens are written beside it,
const WRITABLE = 38; // and before its number is written into it

export class AttentionMap extends EventTarget {
  constructor(canvas, provider, options = {}) {
    super();
    [this.canvas, this.provider] = [canvas, provider];
    this.options = { what: "weights", map: "viridis", scale: "linear", pooling: "mean", hideFirst: false, ...options };
    this.view = new View(provider.qLen, provider.kLen);
    this.tiles = new Map(); // in the order of their last use
    this.asked = new Map();
    this.peaks = new Map();
    this.range = { low: 0, high: 1 };
    [this.cursor, this.locked, this.linked] = [null, null, null];
    this.margin = { left: 72, top: 44, right: 8, bottom: 8 };
    this.colours = palette(this.options.map);
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(canvas);
    this.listen();
    this.resize();
    this.view.fit();
  }

  close() {
    this.watcher.disconnect();
    this.hands.abort();
    for (const { abort } of this.asked.values()) abort.abort();
    this.closed = true;
  }

  // What is asked of it

  set(name, value) {
    if (this.options[name] === value) return;
    this.options[name] = value;
    if (name === "map") this.colours = palette(value);
    for (const tile of this.tiles.values()) tile.picture = null;
    this.changed();
  }

  turn() {
    this.view.turn();
    this.changed();
  }

  fit() {
    this.view.fit();
    this.changed();
  }

  zoom(factor, x, y) {
    this.view.zoom(factor, x, y);
    this.changed();
  }

  /** Look at one pair; `lock` keeps it when the pointer goes elsewhere. */
  look(i, j, { lock = false, reveal = true } = {}) {
    const clamp = (n, length) => Math.max(0, Math.min(length - 1, n));
    this.cursor = { i: clamp(i, this.provider.qLen), j: clamp(j, this.provider.kLen) };
    if (lock) this.locked = { ...this.cursor };
    if (reveal) this.view.reveal(this.cursor.i, this.cursor.j);
    this.tell(lock ? "lock" : "hover", this.cursor);
    this.changed();
  }

  release() {
    this.locked = null;
    this.tell("lock", null);
    this.changed();
  }

  /** Show another map's cursor. */
  link(pair) {
    this.linked = pair;
    this.changed(false);
  }

  /** Ask again for the tiles that were a sample. */
  refresh() {
    for (const tile of this.tiles.values()) if (!tile.exact) tile.stale = true;
    for (const [cell, peaks] of this.peaks) if (!peaks.exact) this.peaks.delete(cell);
    this.changed(false);
  }

  get exact() {
    return this.wanted().every((key) => this.tiles.get(name(key))?.exact);
  }

  /** Whether all that is in sight has come, as exactly as it can be had now. */
  get settled() {
    return !this.pending && this.wanted().every((key) => this.tiles.has(name(key)));
  }

  get cell() {
    const ratio = window.devicePixelRatio || 1;
    const needed = 1 / (this.view.scale * ratio);
    return this.provider.levels.find((level) => level >= needed * 0.999) ?? this.provider.levels.at(-1);
  }

  /** What the map shows at a pair, from its tile: the entry itself when cells are single entries. */
  shown(i, j) {
    const [cell, size] = [this.cell, this.provider.tile];
    const [row, col] = [Math.floor(i / cell), Math.floor(j / cell)];
    const tile = this.tiles.get(name({ what: this.what, cell, row: Math.floor(row / size), col: Math.floor(col / size) }));
    if (!tile) return null;
    const value = numbers(tile, this.options)[(row % size) * tile.cols + (col % size)];
    return { value, cell, exact: tile.exact };
  }

  get what() {
    return this.options.what === "logits" ? "logits" : "weights";
  }

  // Numbers

  wanted(cell = this.cell) {
    const span = cell * this.provider.tile;
    const [i0, i1, j0, j1] = this.view.seen;
    const keys = [];
    for (let row = Math.floor(i0 / span); row * span < i1; row++)
      for (let col = Math.floor(j0 / span); col * span < j1; col++) keys.push({ what: this.what, cell, row, col });
    return keys;
  }

  ask() {
    const top = this.provider.levels.at(-1);
    const keys = [...this.wanted(), ...(this.cell === top ? [] : this.wanted(top))];
    const names = new Set(keys.map(name));
    for (const [key, { abort }] of this.asked) if (!names.has(key)) abort.abort();
    for (const key of keys) {
      const held = this.tiles.get(name(key));
      if (this.asked.has(name(key)) || (held && !held.stale)) continue;
      const abort = new AbortController();
      this.asked.set(name(key), { abort });
      this.provider
        .fetchTile(key, abort.signal)
        .then((tile) => this.keep(name(key), tile))
        .catch((error) => error.name !== "AbortError" && this.tell("trouble", error))
        .finally(() => {
          this.asked.delete(name(key));
          this.changed(false);
        });
    }
    const cell = this.cell;
    if (this.options.scale === "row" && !this.peaks.has(cell)) {
      this.peaks.set(cell, {});
      const gone = () => this.peaks.delete(cell);
      this.provider.rowPeaks(cell).then((peaks) => (this.peaks.set(cell, peaks), this.repaint()), gone);
    }
  }

  keep(key, tile) {
    this.tiles.delete(key);
    this.tiles.set(key, { ...tile, picture: null, stale: false });
    for (const old of this.tiles.keys()) {
      if (this.tiles.size <= KEPT) break;
      this.tiles.delete(old);
    }
  }

  repaint() {
    for (const tile of this.tiles.values()) tile.picture = null;
    this.changed(false);
  }

  /** The range of the colours: what is in sight, at the size of cell in sight.
   *
   * Weights go up to what nine rows of ten reach with their largest cell: the first rows of a causal A, which see few
   * keys, would otherwise leave all others dark. What is above is shown as the top, and the colour bar says so.
   */
  measure() {
    const rows = new Map(); // the largest and least number of each row of cells in sight
    for (const key of this.wanted()) {
      const tile = this.tiles.get(name(key));
      if (!tile) continue;
      const values = numbers(tile, this.options);
      for (let row = 0; row < tile.rows; row++) {
        const at = key.row * this.provider.tile + row;
        let [low, high] = rows.get(at) ?? [Infinity, -Infinity];
        for (const x of values.subarray(row * tile.cols, (row + 1) * tile.cols)) {
          if (x > high && x !== Infinity) high = x;
          if (x < low && x !== -Infinity) low = x;
        }
        if (high !== -Infinity) rows.set(at, [low, high]);
      }
    }
    if (!rows.size) return;
    const highs = Float64Array.from(rows.values(), ([, high]) => high).sort();
    const top = highs.at(-1);
    let range;
    if (this.what === "logits") {
      const low = Math.min(...[...rows.values()].map(([least]) => least));
      range = { low, high: Math.max(top, low + 1e-6), top };
    } else range = { low: 0, high: highs[Math.floor(0.9 * (highs.length - 1))] || top || 1, top };
    const pooled = this.options.pooling === "mean" && this.cell > 1;
    this.nearPeaks = pooled ? rows : null; // means have no largest number of their own: each row's, of what is in sight
    const same = range.low === this.range.low && range.high === this.range.high && range.top === this.range.top;
    if (same && !(pooled && this.options.scale === "row")) return;
    this.range = range;
    for (const tile of this.tiles.values()) tile.picture = null;
    if (!same) this.tell("range", range);
  }

  // Drawing

  changed(moved = true) {
    if (moved) this.tell("view", this.view.state);
    if (this.pending || this.closed) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.ask();
      this.measure();
      this.draw();
    });
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    this.canvas.width = Math.max(1, Math.round(width * ratio));
    this.canvas.height = Math.max(1, Math.round(height * ratio));
    const { left, top, right, bottom } = this.margin;
    this.view.resize(width - left - right, height - top - bottom);
    this.changed();
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const pen = this.canvas.getContext("2d");
    const style = getComputedStyle(this.canvas);
    this.ink = {
      text: style.getPropertyValue("--ink") || "#222", faint: style.getPropertyValue("--faint") || "#999",
      paper: style.getPropertyValue("--paper") || "#fff", hidden: style.getPropertyValue("--hidden") || "#e6e6e6",
      query: style.getPropertyValue("--query") || "#d9730d", key: style.getPropertyValue("--key") || "#1a8f4c",
    }; // prettier-ignore
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    const { left, top } = this.margin;
    pen.save();
    pen.translate(left, top);
    pen.beginPath();
    pen.rect(0, 0, this.view.width, this.view.height);
    pen.clip();
    this.drawTiles(pen);
    if (this.cell === 1 && this.view.scale >= WRITABLE) this.drawNumbers(pen);
    this.drawCursor(pen);
    this.drawMinimap(pen);
    pen.restore();
    this.drawAxes(pen);
    this.tell("drawn", null);
  }

  drawTiles(pen) {
    const [x0, y0] = this.view.point(0, 0);
    const [x1, y1] = this.view.point(this.provider.qLen, this.provider.kLen);
    pen.fillStyle = this.ink.hidden;
    pen.fillRect(Math.min(x0, x1), Math.min(y0, y1), Math.abs(x1 - x0), Math.abs(y1 - y0));
    const levels = this.provider.levels.filter((level) => level >= this.cell).reverse();
    pen.imageSmoothingEnabled = false;
    const complete = this.wanted().every((key) => this.tiles.has(name(key)));
    for (const level of complete ? [this.cell] : levels) {
      for (const key of this.wanted(level)) {
        const held = this.tiles.get(name(key));
        if (held) this.drawTile(pen, key, held);
      }
    }
  }

  /** The number of every entry in sight, dark or light as its colour needs. */
  drawNumbers(pen) {
    const [i0, i1, j0, j1] = this.view.seen;
    const percent = this.options.what === "percent";
    pen.font = "11px system-ui, sans-serif";
    [pen.textAlign, pen.textBaseline] = ["center", "middle"];
    for (let i = i0; i < i1; i++)
      for (let j = j0; j < j1; j++) {
        const value = this.shown(i, j)?.value;
        if (value === undefined || Number.isNaN(value)) continue;
        const [x, y] = this.view.point(i + 0.5, j + 0.5);
        pen.fillStyle = this.isLight(value, i) ? "#111" : "#fff";
        pen.globalAlpha = this.what === "weights" && value < 0.005 ? 0.5 : 1; // what hardly counts is hardly seen
        pen.fillText(brief(value, percent), x, y);
      }
    pen.globalAlpha = 1;
  }

  /** Whether an entry's colour is a light one. */
  isLight(value, i) {
    const colour = this.colours[this.colourOf(value, i, 1)];
    return 0.3 * (colour & 255) + 0.59 * ((colour >> 8) & 255) + 0.11 * ((colour >> 16) & 255) > 140;
  }

  /** The number of the colour of a value in a row of cells. */
  colourOf(value, at, cell) {
    const { scale, hideFirst } = this.options;
    const real = this.what === "logits" ? "linear" : scale; // logits have no share and no logarithm
    const peaks = real === "row" ? this.peaks.get(cell)?.[hideFirst ? "rest" : "all"] : null;
    const peak = real === "row" ? (this.nearPeaks?.get(at)?.[1] ?? peaks?.[at] ?? this.range.high) : 1;
    const share = value === -Infinity ? 0 : shareOf(real, value, this.range, peak || 1);
    return share > 0 ? Math.min(255, Math.round(share * 255)) : 0;
  }

  drawTile(pen, { cell, row, col }, tile) {
    tile.picture ??= this.paint(tile, cell, row);
    const span = cell * this.provider.tile;
    const { scale, u, v, transposed } = this.view;
    const size = cell * scale;
    pen.save();
    if (transposed) pen.transform(0, 1, 1, 0, 0, 0); // now x runs along keys again
    const [x, y] = transposed ? [(col * span - v) * scale, (row * span - u) * scale] : [(col * span - u) * scale, (row * span - v) * scale];
    pen.drawImage(tile.picture, x, y, tile.cols * size, tile.rows * size);
    pen.restore();
  }

  /** A tile as a small picture, a pixel a cell. */
  paint(tile, cell, row) {
    const picture = new OffscreenCanvas(tile.cols, tile.rows);
    const pen = picture.getContext("2d");
    const image = pen.createImageData(tile.cols, tile.rows);
    const pixels = new Uint32Array(image.data.buffer);
    const values = numbers(tile, this.options);
    for (let n = 0; n < values.length; n++) {
      const value = values[n];
      if (Number.isNaN(value)) continue; // nothing visible: transparent
      pixels[n] = this.colours[this.colourOf(value, row * this.provider.tile + Math.floor(n / tile.cols), cell)];
    }
    pen.putImageData(image, 0, 0);
    return picture;
  }

  drawCursor(pen) {
    const [left, top] = this.view.point(0, 0).map((x) => Math.max(0, x));
    const [right, bottom] = this.view.point(this.provider.qLen, this.provider.kLen);
    const ends = [Math.min(right, this.view.width), Math.min(bottom, this.view.height)];
    const mark = (pair, dash) => {
      const [x, y] = this.view.point(pair.i, pair.j);
      const size = Math.max(this.view.scale, 1);
      const [across, down] = this.view.transposed ? [this.ink.key, this.ink.query] : [this.ink.query, this.ink.key];
      pen.setLineDash(dash);
      pen.lineWidth = 1;
      pen.strokeStyle = across; // the row that is looked at
      for (const edge of size > 4 ? [y, y + size] : [y + size / 2]) line(pen, left, edge, ends[0], edge);
      pen.strokeStyle = down;
      for (const edge of size > 4 ? [x, x + size] : [x + size / 2]) line(pen, edge, top, edge, ends[1]);
      pen.setLineDash([]);
      if (size <= 4) return;
      pen.lineWidth = 2;
      pen.strokeStyle = this.ink.paper;
      pen.strokeRect(x, y, size, size);
      pen.lineWidth = 1;
      pen.strokeStyle = this.ink.text;
      pen.strokeRect(x - 1, y - 1, size + 2, size + 2);
    };
    if (this.locked) mark(this.locked, []);
    if (this.linked) mark(this.linked, [2, 3]);
    if (this.cursor && !same(this.cursor, this.locked)) mark(this.cursor, [4, 3]);
  }

  /** All of A in a corner, with a frame around what is seen; only when something is out of sight. */
  drawMinimap(pen) {
    this.minimap = null;
    if (this.view.scale <= this.view.fitting * 1.01) return;
    const [uLen, vLen] = [this.view.uLen, this.view.vLen];
    const size = Math.min(140, this.view.width / 3, this.view.height / 3);
    const scale = size / Math.max(uLen, vLen);
    const [width, height] = [uLen * scale, vLen * scale];
    const [x, y] = [this.view.width - width - 8, 8];
    pen.fillStyle = this.ink.hidden;
    pen.fillRect(x, y, width, height);
    const [top, span] = [this.provider.levels.at(-1), this.provider.levels.at(-1) * this.provider.tile];
    pen.save();
    pen.translate(x, y);
    if (this.view.transposed) pen.transform(0, 1, 1, 0, 0, 0);
    for (const [key, tile] of this.tiles) {
      const [what, cell, row, col] = key.split("/");
      if (what !== this.what || Number(cell) !== top) continue;
      tile.picture ??= this.paint(tile, top, Number(row));
      pen.drawImage(tile.picture, col * span * scale, row * span * scale, tile.cols * top * scale, tile.rows * top * scale);
    }
    pen.restore();
    pen.lineWidth = 1;
    pen.strokeStyle = this.ink.faint;
    pen.strokeRect(x - 0.5, y - 0.5, width + 1, height + 1);
    pen.lineWidth = 2;
    pen.strokeStyle = this.ink.query;
    const [w, h] = [this.view.width / this.view.scale, this.view.height / this.view.scale];
    pen.strokeRect(x + this.view.u * scale, y + this.view.v * scale, Math.max(3, w * scale), Math.max(3, h * scale));
    this.minimap = { x, y, width, height, scale };
  }

  drawAxes(pen) {
    const { left, top } = this.margin;
    const { transposed, scale, u, v, width, height } = this.view;
    const [across, down] = transposed ? ["q", "k"] : ["k", "q"];
    const colour = { q: this.ink.query, k: this.ink.key };
    const names = this.options.axes ?? { q: "query", k: "key" };
    pen.font = "600 12px system-ui, sans-serif";
    pen.textBaseline = "top";
    pen.fillStyle = colour[across];
    pen.textAlign = "left";
    const [x0, y0] = this.view.point(0, 0).map((x) => Math.max(0, x)); // names and labels stand beside the matrix, not beside the plot
    pen.fillText(`${names[across]} →`, left + x0, y0 + 2);
    pen.save();
    pen.translate(x0 + 2, top + y0);
    pen.rotate(-Math.PI / 2);
    pen.fillStyle = colour[down];
    pen.textAlign = "right";
    pen.fillText(`← ${names[down]}`, 0, 0);
    pen.restore();
    pen.font = "11px system-ui, 'Noto Sans CJK SC', 'WenQuanYi Zen Hei', sans-serif";
    const marks = (side, start, size, length, place) => {
      if (scale >= READABLE) {
        for (let n = Math.max(0, Math.floor(start)); n < Math.min(length, start + size / scale); n++)
          place((n + 0.5 - start) * scale, this.provider.label?.(side, n) ?? String(n), colour[side], true);
        return;
      }
      const step = nice(80 / scale);
      for (let n = Math.ceil(Math.max(0, start) / step) * step; n < Math.min(length, start + size / scale); n += step)
        place((n - start) * scale, String(n), this.ink.text, false);
    };
    marks(down, v, height, this.view.vLen, (y, text, ink) => {
      if (y < 0 || y > height) return;
      pen.fillStyle = ink;
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      pen.fillText(short(pen, text, left - 18), left + x0 - 4, top + y);
    });
    marks(across, u, width, this.view.uLen, (x, text, ink, token) => {
      if (x < 0 || x > width) return;
      pen.fillStyle = ink;
      pen.save();
      pen.translate(left + x, top + y0 - 4);
      if (token) pen.rotate(-Math.PI / 4);
      pen.textAlign = token ? "left" : "center";
      pen.textBaseline = token ? "middle" : "bottom";
      pen.fillText(short(pen, text, token ? 40 : 80), 0, 0);
      pen.restore();
    });
  }

  // Hands

  listen() {
    this.hands = new AbortController();
    const { signal } = this.hands;
    const on = (event, act, more = {}) => this.canvas.addEventListener(event, act, { signal, ...more });
    const fingers = new Map();
    let moved = 0;
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left - this.margin.left, event.clientY - box.top - this.margin.top];
    };
    on("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.002)), ...place(event));
    }, { passive: false }); // prettier-ignore
    on("pointerdown", (event) => {
      this.canvas.focus({ preventScroll: true });
      this.canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, place(event));
      moved = 0;
      const box = this.minimap;
      const [x, y] = place(event);
      if (box && x >= box.x && x <= box.x + box.width && y >= box.y && y <= box.y + box.height) {
        this.view.centre((x - box.x) / box.scale, (y - box.y) / box.scale);
        fingers.delete(event.pointerId);
        this.changed();
      }
    });
    on("pointermove", (event) => {
      const [x, y] = place(event);
      const before = fingers.get(event.pointerId);
      if (!before) {
        const pair = this.view.pair(x, y);
        if (pair && !same(pair, this.cursor)) this.look(pair.i, pair.j, { reveal: false });
        return;
      }
      const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
      if (other) {
        const spread = (p) => Math.hypot(p[0] - other[0], p[1] - other[1]) || 1;
        this.zoom(spread([x, y]) / spread(before), (x + other[0]) / 2, (y + other[1]) / 2);
      } else {
        this.view.move(x - before[0], y - before[1]);
        this.changed();
      }
      moved += Math.hypot(x - before[0], y - before[1]);
      fingers.set(event.pointerId, [x, y]);
    });
    const lift = (event) => {
      const down = fingers.delete(event.pointerId);
      const pair = this.view.pair(...place(event));
      if (!down || moved > 4 || !pair || event.type === "pointercancel") return;
      if (same(pair, this.locked)) this.release();
      else this.look(pair.i, pair.j, { lock: true, reveal: false });
    };
    on("pointerup", lift);
    on("pointercancel", lift);
    on("dblclick", (event) => this.zoom(4, ...place(event)));
    on("pointerleave", () => {
      if (!fingers.size && this.cursor) {
        this.cursor = null;
        this.tell("hover", null);
        this.changed(false);
      }
    });
    on("keydown", (event) => this.press(event));
  }

  /** Keys: arrows move the cursor (with shift by a tenth of what is seen), + and - zoom, 0 fits, Enter locks. */
  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [i0, i1, j0, j1] = this.view.seen;
    const here = this.cursor ?? this.locked ?? { i: Math.floor((i0 + i1) / 2), j: Math.floor((j0 + j1) / 2) };
    const step = (from, to) => (event.shiftKey ? Math.max(1, Math.round((to - from) / 10)) : Math.max(1, this.cell));
    const along = this.view.transposed ? { x: ["i", step(i0, i1)], y: ["j", step(j0, j1)] } : { x: ["j", step(j0, j1)], y: ["i", step(i0, i1)] };
    const go = (axis, sign) => {
      const [name, size] = along[axis];
      this.look(name === "i" ? here.i + sign * size : here.i, name === "j" ? here.j + sign * size : here.j);
    };
    const acts = {
      ArrowLeft: () => go("x", -1), ArrowRight: () => go("x", 1), ArrowUp: () => go("y", -1), ArrowDown: () => go("y", 1),
      Home: () => this.look(here.i, 0), End: () => this.look(here.i, this.provider.kLen - 1),
      PageUp: () => this.look(here.i - (i1 - i0), here.j), PageDown: () => this.look(here.i + (i1 - i0), here.j),
      "+": () => this.zoomOn(here, 1.5), "=": () => this.zoomOn(here, 1.5), "-": () => this.zoomOn(here, 1 / 1.5),
      0: () => this.fit(), z: () => this.zoomOn(here, LARGEST),
      Enter: () => (same(here, this.locked) ? this.release() : this.look(here.i, here.j, { lock: true })),
      Escape: () => this.release(),
    }; // prettier-ignore
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  zoomOn(pair, factor) {
    const [x, y] = this.view.point(pair.i + 0.5, pair.j + 0.5);
    const inside = (p, size) => Math.max(0, Math.min(size, p));
    this.zoom(factor, inside(x, this.view.width), inside(y, this.view.height));
    this.view.reveal(pair.i, pair.j);
    this.changed();
  }

  tell(event, detail) {
    this.dispatchEvent(new CustomEvent(event, { detail }));
  }
}

const name = ({ what, cell, row, col }) => `${what}/${cell}/${row}/${col}`;
const same = (a, b) => Boolean(a && b && a.i === b.i && a.j === b.j);

/** The numbers of a tile that are shown: means or largest, with the first key or without. Kept with the tile. */
function numbers(tile, { pooling, hideFirst }) {
  const values = pooling === "max" ? tile.max : tile.mean;
  if (!hideFirst || !tile.first) return values;
  const shown = (tile.hidden ??= {});
  if (!shown[pooling]) {
    shown[pooling] = Float32Array.from(values);
    const first = pooling === "max" ? tile.first.max : tile.first.mean;
    for (let row = 0; row < tile.rows; row++) shown[pooling][row * tile.cols] = first[row];
  }
  return shown[pooling];
}

function line(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(Math.round(x0) + 0.5, Math.round(y0) + 0.5);
  pen.lineTo(Math.round(x1) + 0.5, Math.round(y1) + 0.5);
  pen.stroke();
}

/** 1, 2 or 5 times a power of ten, at least `x`. */
function nice(x) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, x)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= x);
}

function short(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let kept = [...text];
  while (kept.length > 1 && pen.measureText(kept.join("") + "…").width > width) kept = kept.slice(0, -1);
  return kept.join("") + "…";
}
