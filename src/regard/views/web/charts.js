// Small charts of a few hundred numbers, which answer to the pointer and the arrow keys.

import { h, ink, sharp } from "./dom.js";
import { human } from "./colour.js";

/** A chart of `values`; place n of it is called `nameOf(n)`. Clicking calls `choose(n)`. */
export function chart(title, values, { nameOf = String, choose = null, colour = "accent", zero = null, id = null } = {}) {
  const canvas = h("canvas", { className: "chart", id, tabIndex: 0, role: "img", "aria-label": title });
  const note = h("div", { className: "chart-note number" });
  let at = null;
  const top = Math.max(...values.filter(Number.isFinite), 1e-12);
  const draw = () => {
    const { pen, width, height } = sharp(canvas);
    const base = height - 1;
    pen.fillStyle = ink(colour);
    const step = width / values.length;
    values.forEach((x, n) => {
      if (!Number.isFinite(x)) return;
      const size = (x / top) * (base - 4);
      pen.fillRect(n * step, base - size, Math.max(1, step - (step > 4 ? 1 : 0)), size);
    });
    pen.fillStyle = ink("line");
    pen.fillRect(0, base, width, 1);
    if (zero !== null) pen.fillRect((zero + 0.5) * step, 0, 1, height);
    if (at !== null) {
      pen.fillStyle = ink("delta");
      pen.fillRect((at + 0.5) * step - 0.5, 0, 1, height);
    }
  };
  const tell = (n) => {
    at = n === null ? null : Math.max(0, Math.min(values.length - 1, n));
    canvas.place = at; // for tests and for the curious
    note.textContent = at === null ? "" : `${nameOf(at)}: ${human(values[at])}`;
    note.dataset.value = at === null ? "" : values[at];
    draw();
  };
  const place = (event) => Math.floor(((event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth) * values.length);
  canvas.addEventListener("pointermove", (event) => tell(place(event)));
  canvas.addEventListener("pointerleave", () => tell(null));
  canvas.addEventListener("click", (event) => choose?.(place(event)));
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in moves) tell((at ?? Math.floor(values.length / 2)) + moves[event.key] * (event.shiftKey ? 10 : 1));
    else if (event.key === "Enter" && at !== null) choose?.(at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  requestAnimationFrame(draw);
  return h("div", {}, h("h2", {}, title), canvas, note);
}
