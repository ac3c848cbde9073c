// A lesson's words, tables, heat maps and bars as elements. All of it comes computed; here it is only written down.

import { h } from "./dom.js";
import { curve } from "./lesson_curve.js";
import { heat, shares } from "./lesson_parts.js";

/** Words with code set apart: what stands between backticks. */
export function marked(text) {
  return text.split("`").map((part, n) => (n % 2 ? h("code", {}, part) : part));
}

/** What stands to the right in its column. */
const NUMBER = /^\s*[-−+]?[\d.,]+(e[-+]?\d+)?\s*%?\s*$/;

const kinds = {
  paragraph: ({ label, text }) => h("p", {}, label ? h("b", {}, `${label} `) : null, ...marked(text)),
  question: ({ question, answer }, say) => h("div", {}, h("p", {}, ...marked(question)), h("details", {}, h("summary", {}, say("answer")), h("p", {}, ...marked(answer)))),
  show: ({ parts }, say) => h("div", { className: "beside" }, parts.map((part) => block(part, say))),
  table: ({ header, rows }) => {
    const side = header.map((_, n) => (rows.every((row) => NUMBER.test(row[n])) ? "n" : ""));
    const head = h("thead", {}, h("tr", {}, header.map((text, n) => h("th", { scope: "col", className: side[n] }, text))));
    return h("div", { className: "wide" }, h("table", { className: "plain" }, head, h("tbody", {}, rows.map((row) => h("tr", {}, row.map((text, n) => h("td", { className: side[n] }, text)))))));
  },
  map: (given, say) => heat({ ...given, masked: say("masked") }).element,
  bars: ({ title, values, labels, texts, upright }) => upright ? curve({ title: title ?? "", series: [{ name: "", values }], labels }).element : h("figure", {}, title ? h("figcaption", {}, title) : null, shares({ values, labels, texts }).element),
  picture: ({ svg }) => h("div", { className: "terminal" }, document.importNode(new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, true)),
}; // prettier-ignore

export const block = (given, say) => kinds[given.kind](given, say);
