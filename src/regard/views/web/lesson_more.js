// Parts that some lessons need: a line to write on, tokens in a row, and a matrix with more cells than a table can have.

import { css, human, palette } from "./colour.js";
import { fill, h, ink, sharp } from "./dom.js";

const colours = palette("viridis");

/** A line of text to change; `set(text)` is told while it is written, if it says something. */
export function entry({ label, value, set, id, most = null }) {
  const input = h("input", { type: "text", className: "entry", id, maxLength: most ?? 200, spellcheck: false, autocomplete: "off", on: { input: () => input.value.trim() && set(input.value) } });
  const update = (text) => document.activeElement !== input && input.value !== text && (input.value = text);
  update(value);
  return { element: h("label", { className: "line-entry" }, h("span", {}, label), input), input, update };
}

/** Tokens in a row. `shade(n)` from 0 to 1 colours one, `name(n)` names its class, `said(n)` is its title. */
export function chips({ label, id, className = "" }) {
  const list = h("span", { className: "chips", id });
  const update = (tokens, { shade = null, name = () => "", said = () => "" } = {}) =>
    fill(list, tokens.map((text, n) => {
      const chip = h("span", { className: `chip ${name(n)}`, title: said(n) }, text);
      if (shade) [chip.style.background, chip.style.color] = [css(colours, shade(n)), shade(n) > 0.6 ? "#000" : "#fff"];
      return chip;
    })); // prettier-ignore
  return { element: h("div", { className: `chip-row ${className}` }, h("b", {}, label), list), update };
}

/** A matrix as a picture: `point(i, j)` is told what the mouse or the arrow keys are on. `mark(i, j)` shows a pair. */
export function pixels({ title = "", id, rows = null, columns = null, point = null, choose = null }) {
  const picture = h("canvas", { className: "pixels", tabIndex: 0, role: "img", id });
  let [now, at] = [{ cells: [[0]], visible: null, rows, columns }, null];
  const frame = () => {
    const { pen, width, height } = sharp(picture);
    pen.font = "13px system-ui, 'PingFang SC', 'Microsoft YaHei', 'Noto Sans CJK SC', 'WenQuanYi Zen Hei', sans-serif";
    const longest = Math.max(0, ...(now.rows ?? []).map((text) => pen.measureText(text).width));
    const [left, top] = now.rows ? [Math.min(90, longest) + 8, 26] : [4, 4];
    const size = Math.min((width - left - 4) / now.cells[0].length, (height - top - 4) / now.cells.length);
    return { pen, width, height, left, top, size };
  };
  const draw = () => {
    if (!picture.clientWidth) return;
    const { pen, width, height, left, top, size } = frame();
    pen.clearRect(0, 0, width, height);
    const flat = now.cells.flat().filter(Number.isFinite);
    const [low, high] = [now.low ?? 0, now.high ?? Math.max(...flat, 1e-12)];
    now.cells.forEach((row, i) => row.forEach((x, j) => {
      const seen = (now.visible?.[i]?.[j] ?? true) && x !== null;
      pen.fillStyle = seen ? css(colours, (x - low) / (high - low || 1)) : ink("hidden");
      pen.fillRect(left + j * size, top + i * size, size + (size < 8 ? 0.4 : -1), size + (size < 8 ? 0.4 : -1));
    })); // prettier-ignore
    if (now.rows && size >= 9) {
      pen.fillStyle = ink("ink");
      pen.textBaseline = "middle";
      pen.textAlign = "right";
      now.rows.forEach((text, i) => pen.fillText(text, left - 5, top + (i + 0.5) * size, left - 6));
      pen.textAlign = "center";
      (now.columns ?? now.rows).forEach((text, j) => size >= 16 && pen.fillText(text, left + (j + 0.5) * size, top - 12, size * 1.15));
    }
    if (!at) return;
    pen.lineWidth = 2;
    pen.strokeStyle = ink("query");
    pen.strokeRect(left - 1, top + at[0] * size - 1, size * now.cells[0].length + 2, size + 2);
    pen.strokeStyle = ink("key");
    pen.strokeRect(left + at[1] * size - 1, top - 1, size + 2, size * now.cells.length + 2);
    pen.strokeStyle = ink("delta");
    pen.strokeRect(left + at[1] * size - 1, top + at[0] * size - 1, size + 2, size + 2);
  };
  const clamp = (n, count) => Math.max(0, Math.min(count - 1, n));
  const mark = (i, j) => {
    at = i === null ? null : [clamp(i, now.cells.length), clamp(j, now.cells[0].length)];
    if (at) {
      const [a, b] = [now.rows?.[at[0]] ?? at[0], (now.columns ?? now.rows)?.[at[1]] ?? at[1]];
      const seen = now.visible?.[at[0]]?.[at[1]] ?? true;
      picture.setAttribute("aria-label", `${title} ${a} → ${b}: ${seen ? human(now.cells[at[0]][at[1]]) : "·"}`);
    } else picture.setAttribute("aria-label", title);
    draw();
  };
  const go = (i, j) => (mark(i, j), point?.(...at));
  const under = (event) => {
    const { left, top, size } = frame();
    draw();
    const box = picture.getBoundingClientRect();
    const [j, i] = [(event.clientX - box.left - left) / size, (event.clientY - box.top - top) / size].map(Math.floor);
    return i < 0 || j < 0 || i >= now.cells.length || j >= now.cells[0].length ? null : [i, j];
  };
  picture.addEventListener("pointermove", (event) => {
    const found = under(event);
    if (found && (!at || found[0] !== at[0] || found[1] !== at[1])) go(...found);
  });
  picture.addEventListener("click", (event) => under(event) && choose?.(...under(event)));
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const [i, j] = at ?? [0, 0];
    if (event.key in moves) go(i + moves[event.key][0] * (event.shiftKey ? 5 : 1), j + moves[event.key][1] * (event.shiftKey ? 5 : 1));
    else if ((event.key === "Enter" || event.key === " ") && choose) choose(i, j);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const watcher = new ResizeObserver(() => (picture.isConnected ? draw() : watcher.disconnect()));
  watcher.observe(picture);
  const update = (given) => {
    now = { ...now, ...given };
    if (at) at = [clamp(at[0], now.cells.length), clamp(at[1], now.cells[0].length)];
    mark(...(at ?? [null, null]));
  };
  const caption = h("figcaption", {}, title);
  return { element: h("figure", {}, caption, picture), caption, picture, update, mark };
}
