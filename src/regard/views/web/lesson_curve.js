// Lines over a few places, on one scale: curves that answer to the pointer and the arrow keys.

import { fill, h } from "./dom.js";
import { fixed, svg } from "./lesson_parts.js";

const [WIDE, HIGH, LEFT, BELOW, ABOVE] = [420, 190, 54, 24, 10];

/** `series` are {name, values, colour}; place n is called `labels[n]`. Clicking or Enter calls `choose(n)`; `mark` is the place chosen. */
export function curve({ title, series, labels, low = null, high = null, mark = null, text = (x) => fixed(x, 3), choose = null, id = null }) {
  const picture = svg("svg", { class: "curve", viewBox: `0 0 ${WIDE} ${HIGH}`, tabindex: 0, role: "img", "aria-label": title, id });
  const note = h("div", { className: "chart-note number" });
  let [now, at] = [null, null];
  const x = (n) => LEFT + ((n + 0.5) * (WIDE - LEFT - 6)) / now.labels.length;
  const y = (value) => ABOVE + ((now.top - value) / (now.top - now.bottom)) * (HIGH - BELOW - ABOVE);

  const tell = (n) => {
    at = n === null ? null : Math.max(0, Math.min(now.labels.length - 1, n));
    const shown = at ?? now.mark;
    note.textContent = shown === null ? " " : `${now.labels[shown]}: ${now.series.map((each) => `${each.name} ${text(each.values[shown])}`.trim()).join("  ·  ")}`;
    draw();
  };
  const draw = () => {
    const parts = [now.bottom, ...(now.bottom < 0 && now.top > 0 ? [0] : []), now.top].map((value) => [
      svg("line", { x1: LEFT, x2: WIDE - 6, y1: y(value), y2: y(value), class: "rule" }),
      svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, text(value)),
    ]);
    const every = Math.ceil(now.labels.length / 11);
    now.labels.forEach((name, n) => n % every === 0 && parts.push(svg("text", { x: x(n), y: HIGH - 6, "text-anchor": "middle" }, name)));
    const here = at ?? now.mark;
    if (here !== null) parts.push(svg("line", { x1: x(here), x2: x(here), y1: ABOVE, y2: HIGH - BELOW, class: "here" }));
    for (const { values, colour = "accent" } of now.series) {
      const points = values.map((value, n) => [x(n), value === null ? null : y(value)]).filter(([, height]) => height !== null);
      parts.push(svg("polyline", { points: points.map((each) => each.join()).join(" "), class: `line ${colour}` }));
      if (values.length <= 40) parts.push(points.map(([cx, cy]) => svg("circle", { cx, cy, r: 3.2, class: `dot ${colour}` })));
    }
    fill(picture, ...parts.flat());
  };
  const place = (event) => {
    const box = picture.getBoundingClientRect();
    return Math.floor(((((event.clientX - box.left) / box.width) * WIDE - LEFT) / (WIDE - LEFT - 6)) * now.labels.length);
  };
  picture.addEventListener("pointermove", (event) => tell(place(event)));
  picture.addEventListener("pointerleave", () => tell(null));
  picture.addEventListener("click", (event) => choose?.(Math.max(0, Math.min(now.labels.length - 1, place(event)))));
  picture.addEventListener("focus", () => note.setAttribute("aria-live", "polite")); // read out to who moves over it, and to nobody else
  picture.addEventListener("blur", () => note.removeAttribute("aria-live"));
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in moves) tell((at ?? now.mark ?? 0) + moves[event.key] * (event.shiftKey ? 10 : 1));
    else if (event.key === "Enter" && at !== null) choose?.(at);
    else return;
    event.preventDefault();
  });
  const update = (given) => {
    now = { ...now, ...given };
    const all = now.series.flatMap((each) => each.values).filter((value) => value !== null);
    now.top = now.high ?? Math.max(...all, 0);
    now.bottom = now.low ?? Math.min(...all, 0);
    if (now.top === now.bottom) now.top = now.bottom + 1;
    if (at !== null && at >= now.labels.length) at = null;
    tell(at);
  };
  update({ series, labels, low, high, mark });
  const key = series.length > 1 ? h("span", { className: "faint" }, series.map(({ name, colour = "accent" }) => h("span", { className: `series ${colour}` }, name))) : null;
  return { element: h("figure", {}, h("figcaption", {}, h("b", {}, title), " ", key), picture, note), update };
}
