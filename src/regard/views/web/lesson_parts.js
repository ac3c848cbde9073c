// What the lessons' pictures are made of: sliders, choices, bars to drag, heat maps, tables of numbers. Each answers to the mouse
// and to the keyboard. A part is {element, update}: `update` shows new numbers without losing the focus.

import { css, human, palette } from "./colour.js";
import { fill, h } from "./dom.js";

let count = 0;
const newId = () => `part-${++count}`;
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
/** A number on the steps of its bounds, free of digits that only rounding made. */
const onStep = (x, [low, high, step]) => Number(clamp(Math.round(x / step) * step, low, high).toFixed(10));

export const fixed = (x, digits = 4) => (x === null || x === undefined ? "–" : x.toFixed(digits).replace(/^-(?=0\.?0*$)/, "").replace("-", "−"));

/** An SVG element; attributes, then children. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function button(text, act, more = {}) {
  return h("button", { type: "button", on: { click: act }, ...more }, text);
}

/** A number to slide; `bounds` is [low, high, step]. */
export function slider({ label, value, bounds, set, text = human, id }) {
  const [low, high, step] = bounds;
  const name = id ?? newId();
  const shown = h("output", { htmlFor: name, className: "number" });
  const input = h("input", { type: "range", id: name, min: low, max: high, step, on: { input: () => (write(Number(input.value)), set(Number(input.value))) } });
  const write = (x) => {
    shown.textContent = text(x);
    input.setAttribute("aria-valuetext", text(x));
  };
  const update = (x) => {
    if (Number(input.value) !== x) input.value = x;
    write(x);
  };
  update(value);
  return { element: h("div", { className: "slider" }, h("label", { htmlFor: name }, label), input, shown), input, update };
}

/** One of several; `options` are [value, text]. The arrow keys change it. */
export function choice({ label, value, options, set, id }) {
  const name = id ?? newId();
  const inputs = options.map(([key], n) => h("input", { type: "radio", name, id: `${name}-${n}`, value: String(key), on: { change: () => set(key) } }));
  const update = (x) => options.forEach(([key], n) => (inputs[n].checked = key === x));
  update(value);
  const parts = options.map(([, text], n) => h("label", { htmlFor: `${name}-${n}` }, inputs[n], h("span", {}, text)));
  return { element: h("fieldset", { className: "choice", id: name }, h("legend", {}, label), parts), update };
}

/** Yes or no. */
export function check({ label, value, set, id }) {
  const input = h("input", { type: "checkbox", id: id ?? newId(), on: { change: () => set(input.checked) } });
  const update = (x) => (input.checked = x);
  update(value);
  return { element: h("label", { className: "check" }, input, h("span", {}, label)), update };
}

/** A number that is shown large, under its name. `data-value` holds it unrounded. */
export function figure(label, { id, note = "" } = {}) {
  const shown = h("output", { className: "big number", id });
  const small = h("span", { className: "faint small" }, note);
  const update = (x, text = human(x), more = note) => {
    shown.dataset.value = String(x);
    shown.textContent = text;
    small.textContent = more;
  };
  return { element: h("div", { className: "figure" }, h("span", { className: "faint" }, label), shown, small), update };
}

/** Lying bars with their names and numbers, to look at; `mark` is the one that stands out. */
export function shares({ values, labels, texts, high = null, mark = null }) {
  const element = h("div", { className: "shares" });
  const update = ({ values, labels, texts, high = null, mark = null }) => {
    const top = high ?? Math.max(...values.map(Math.abs), 1e-12);
    fill(element, values.map((x, n) => {
      const bar = h("i", { className: x < 0 ? "minus" : n === mark ? "mark" : "" });
      bar.style.width = `${(100 * Math.abs(x ?? 0)) / top}%`;
      return h("div", { className: "share", data: { value: x } }, h("span", { className: "name" }, labels[n]), h("span", { className: "track", "aria-hidden": "true" }, bar), h("span", { className: "n number" }, texts?.[n] ?? fixed(x)));
    })); // prettier-ignore
  };
  update({ values, labels, texts, high, mark });
  return { element, update };
}

/** Upright bars to drag up and down, or to change with the arrow keys; `set(n, x)` is told. */
export function columns({ values, bounds, label, set, text = (x) => fixed(x, 1) }) {
  const [low, high, step] = bounds;
  const element = h("div", { className: "columns" });
  let bars = [];
  const zero = (100 * (0 - low)) / (high - low);
  const build = (values) => {
    bars = values.map((_, n) => {
      const [fillBar, shown] = [h("i"), h("span", { className: "number" })];
      const bar = h("div", { className: "column", tabIndex: 0, role: "slider", "aria-orientation": "vertical", "aria-label": label(n), "aria-valuemin": String(low), "aria-valuemax": String(high) }, fillBar);
      const move = (x) => (write(n, onStep(x, bounds)), set(n, onStep(x, bounds)));
      const drag = (event) => {
        const box = bar.getBoundingClientRect();
        move(low + ((box.bottom - event.clientY) / box.height) * (high - low));
      };
      bar.addEventListener("pointerdown", (event) => (bar.setPointerCapture(event.pointerId), drag(event)));
      bar.addEventListener("pointermove", (event) => bar.hasPointerCapture(event.pointerId) && drag(event));
      bar.addEventListener("keydown", (event) => {
        const now = Number(bar.getAttribute("aria-valuenow"));
        const by = step * (event.shiftKey ? 10 : 1);
        const goes = { ArrowUp: now + by, ArrowDown: now - by, ArrowRight: now + by, ArrowLeft: now - by, PageUp: now + 10 * step, PageDown: now - 10 * step, Home: low, End: high };
        if (!(event.key in goes)) return;
        event.preventDefault();
        move(goes[event.key]);
      });
      return { bar, fillBar, shown };
    });
    fill(element, bars.map(({ bar, shown }) => h("div", {}, bar, shown)));
  };
  const write = (n, x) => {
    const { bar, fillBar, shown } = bars[n];
    const place = (100 * (x - low)) / (high - low);
    fillBar.style.bottom = `${Math.min(zero, place)}%`;
    fillBar.style.height = `${Math.abs(place - zero)}%`;
    fillBar.className = x < 0 ? "minus" : "";
    bar.setAttribute("aria-valuenow", String(x));
    bar.setAttribute("aria-valuetext", text(x));
    shown.textContent = text(x);
  };
  const update = (values) => {
    if (values.length !== bars.length) build(values);
    values.forEach((x, n) => write(n, x));
  };
  update(values);
  return { element, update };
}

const colours = palette("viridis");
/** Black or white, whichever can be read on a colour of the map. */
const over = (share) => (share > 0.46 ? "#000" : "#fff");

/** A table of coloured cells: rows are queries, columns are keys. `point(i, j)` is told what the mouse or the arrow keys are on;
 *  `choose(i, j)` what was clicked, or entered. */
export function heat({ cells, visible = null, texts = null, rows, columns, low = 0, high = 1, title = "", axes = "", masked = "", point = null, choose = null, id = null }) {
  const table = h("table", { className: "heat", id });
  let [now, held, at] = [{}, [], [0, 0]];
  const shareOf = (x) => clamp(now.high > now.low ? (x - now.low) / (now.high - now.low) : 0, 0, 1);
  const paint = (i, j) => {
    const [cell, x] = [held[i][j], now.cells[i][j]];
    const seen = now.visible?.[i]?.[j] ?? true;
    const known = seen && x !== null && x !== undefined;
    cell.style.background = known ? css(colours, shareOf(x)) : "";
    cell.style.color = known ? over(shareOf(x)) : "";
    cell.textContent = now.texts ? now.texts[i][j] : known ? "" : "·";
    cell.classList.toggle("masked", !known);
    cell.dataset.value = known ? String(x) : "";
    const said = known ? (now.texts ? now.texts[i][j] : human(x)) : masked;
    cell.title = `${now.rows[i]} → ${now.columns[j]}: ${said}`;
    cell.setAttribute("aria-label", cell.title);
  };
  const go = (i, j, focus = false) => {
    held[at[0]]?.[at[1]]?.setAttribute("tabindex", "-1");
    at = [clamp(i, 0, held.length - 1), clamp(j, 0, held[0].length - 1)];
    const cell = held[at[0]][at[1]];
    if (point || choose) cell.tabIndex = 0;
    if (focus) cell.focus();
    point?.(...at);
  };
  const mark = (some) => held.forEach((row, i) => row.forEach((cell, j) => cell.classList.toggle("at", some(i, j))));
  const build = () => {
    held = now.cells.map((row, i) => row.map((_, j) => {
      const cell = h("td", { data: { i, j } });
      if (point || choose) {
        cell.tabIndex = -1;
        cell.addEventListener("pointerenter", () => go(i, j));
        cell.addEventListener("focus", () => go(i, j));
        cell.addEventListener("click", () => choose?.(i, j));
      }
      return cell;
    })); // prettier-ignore
    fill(table, h("thead", {}, h("tr", {}, h("td"), now.columns.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, held.map((row, i) => h("tr", {}, h("th", { scope: "row" }, now.rows[i]), row))));
    if (point || choose) held[0][0].tabIndex = 0;
  };
  table.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!point && !choose) return;
    if (event.key in moves) go(at[0] + moves[event.key][0], at[1] + moves[event.key][1], true);
    else if ((event.key === "Enter" || event.key === " ") && choose) choose(...at);
    else return;
    event.preventDefault();
  });
  const update = (given) => {
    const before = now;
    now = { ...now, ...given };
    const same = (a, b) => a && a.length === b.length && a.every((x, n) => x === b[n]);
    if (!held.length || !same(before.rows, now.rows) || !same(before.columns, now.columns)) {
      at = [0, 0];
      build();
    }
    table.classList.toggle("dense", !now.texts); // colour alone needs little room
    now.cells.forEach((row, i) => row.forEach((_, j) => paint(i, j)));
  };
  update({ cells, visible, texts, rows, columns, low, high });
  const caption = title ? h("figcaption", {}, title) : null;
  return { element: h("figure", {}, caption, h("div", { className: "wide" }, table), axes ? h("div", { className: "faint small" }, axes) : null), table, update, mark, go };
}

/** A table of numbers to change; `set(i, j, x)` is told. Without `set` it is to look at. */
export function numbers({ title, values, rows = null, columns = null, bounds = null, set = null, digits = 2, shape = "", id = null, point = null }) {
  const table = h("table", { className: "numbers", id });
  let held = [];
  const step = bounds?.[2] ?? 0.1;
  const build = (values) => {
    held = values.map((row, i) => row.map((_, j) => {
      if (!set) return h("span", { className: "number" });
      const change = () => Number.isFinite(input.valueAsNumber) && set(i, j, input.valueAsNumber);
      const input = h("input", { type: "number", step, min: bounds?.[0], max: bounds?.[1], "aria-label": `${title} ${rows?.[i] ?? i + 1}, ${columns?.[j] ?? j + 1}`, on: { input: change } });
      return input;
    })); // prettier-ignore
    const cell = (each, i, j) => h("td", { data: { i, j }, on: point ? { pointerenter: () => point(i, j), focusin: () => point(i, j) } : {} }, each);
    fill(table, columns ? h("thead", {}, h("tr", {}, rows ? h("td") : null, columns.map((text) => h("th", { scope: "col" }, text)))) : null, h("tbody", {}, held.map((row, i) => h("tr", {}, rows ? h("th", { scope: "row" }, rows[i]) : null, row.map((each, j) => cell(each, i, j))))));
  };
  const update = (values) => {
    if (values.length !== held.length || values[0]?.length !== held[0]?.length) build(values);
    values.forEach((row, i) => row.forEach((x, j) => {
      const each = held[i][j];
      if (!set) each.textContent = x === null ? "−∞" : fixed(x, digits);
      else if (document.activeElement !== each || !Number.isFinite(each.valueAsNumber)) each.value = Number(x.toFixed(digits));
      (set ? each : each.parentElement).dataset.value = String(x);
    })); // prettier-ignore
  };
  update(values);
  const caption = h("figcaption", {}, h("b", {}, title), shape ? h("span", { className: "faint" }, ` ${shape}`) : null);
  return { element: h("figure", { className: "matrix" }, caption, h("div", { className: "wide" }, table)), update };
}
