// Beside the map: the pair looked at, where its logit comes from, the strongest keys, profiles and shares.

import { human } from "./colour.js";
import { chart } from "./charts.js";
import { fill, h } from "./dom.js";
import { json } from "./server.js";
import { say } from "./words.js";

/** A term's name without its numbers where it is long: Static(Buckets(…)). All of it is in the title. */
const short = (name) => (name.length > 26 && name.includes("(") ? name.replace(/^((?:[^(]*\(){1,2}).*$/, (_, start) => `${start}…${")".repeat(start.split("(").length - 1)}`) : name);

export class Panels {
  constructor(element, { look, announce }) {
    [this.look, this.announce] = [look, announce];
    this.pair = h("section", { className: "readout", id: "readout" });
    this.parts = h("section", { id: "explain" });
    this.keys = h("section", { id: "top-keys" });
    this.queries = h("section", { id: "top-queries" });
    this.profiles = h("section", { id: "profiles" });
    fill(element, this.pair, this.parts, this.keys, this.queries, this.profiles);
    this.clear();
  }

  clear() {
    fill(this.pair, h("h2", {}, say("pair")), h("p", { className: "faint" }, say("nothing")));
    for (const part of [this.parts, this.keys, this.queries]) fill(part);
  }

  /** Show a pair; `state` says how numbers are written. */
  async show(at, pair, label, { what, locked }) {
    const key = `${at}/${pair.i}/${pair.j}`;
    this.current = key;
    clearTimeout(this.timer);
    await new Promise((done) => (this.timer = setTimeout(done, locked ? 0 : 60)));
    if (this.current !== key) return;
    let cell, row, column;
    try {
      [cell, row, column] = await Promise.all([
        json(`/api/cell/${at}?i=${pair.i}&j=${pair.j}`),
        json(`/api/row/${at}?i=${pair.i}&top=12`),
        locked ? json(`/api/column/${at}?j=${pair.j}&top=8`) : null,
      ]);
    } catch (error) {
      if (this.current === key) this.announce(say("failed", { error: error.message }), true);
      return;
    }
    if (this.current !== key) return;
    this.showPair(pair, cell, label, what, locked);
    this.showParts(cell);
    this.showKeys(this.keys, say("topKeys"), row.keys, "j", (j) => this.look(pair.i, j), (j) => label("k", j), say("entropyIs", { entropy: human(row.entropy) }));
    if (column) this.showKeys(this.queries, say("topQueries"), column.queries, "i", (i) => this.look(i, pair.j), (i) => label("q", i), "");
    else fill(this.queries);
  }

  showPair({ i, j }, cell, label, what, locked) {
    const [q, k] = [label("q", i), label("k", j)];
    const weight = human(cell.weight, what === "percent");
    const text = say("readout", { i, j, q, k, weight });
    fill(
      this.pair,
      h("h2", {}, say("pair"), locked ? h("span", { className: "badge" }, ` ${say("locked")}`) : null),
      h("div", {}, h("span", { className: "q" }, `${say("query")} ${i} “${q}”`), " → ", h("span", { className: "k" }, `${say("key")} ${j} “${k}”`)),
      h("div", { className: "big", id: "weight", data: { value: cell.weight } }, what === "logits" ? human(cell.logit) : weight),
      h("div", { className: "faint" }, cell.visible ? `${say("ofRow", { rank: cell.rank })}` : say("hiddenPair")),
    );
    this.announce(cell.visible ? text : `${text} ${say("hiddenPair")}`);
  }

  showParts(cell) {
    const size = Math.max(1e-9, ...cell.parts.map((part) => Math.abs(part.value)));
    const bar = (value) => {
      const stick = h("i", { className: value < 0 ? "minus" : "" });
      const width = (Math.abs(value) / size) * 50;
      stick.style.left = `${value < 0 ? 50 - width : 50}%`;
      stick.style.width = `${width}%`;
      return h("div", { className: "bar" }, stick);
    };
    const named = (name) => (name === "content" ? say("content") : name);
    const line = (name, value, sum) => h("tr", { className: sum ? "sum" : "" }, h("td", { title: name }, short(name)), h("td", {}, sum ? null : bar(value)), h("td", { className: "n" }, human(value)));
    const rows = [...cell.parts.map((part) => line(named(part.name), part.value)), line(say("logitIs"), cell.logit, true), line(say("lse"), cell.lse, true), line(say("softmax"), cell.weight, true)];
    if (cell.share_of_output !== null && cell.share_of_output !== undefined) rows.push(line(say("share"), cell.share_of_output, true));
    fill(this.parts, h("h2", {}, say("explain")), h("table", { className: "parts" }, h("tbody", {}, rows)));
  }

  showKeys(element, title, items, axis, choose, label, note) {
    const top = Math.max(1e-12, ...items.map((item) => item.weight));
    const entry = (item) => {
      const stick = h("i");
      stick.style.width = `${(100 * item.weight) / top}%`;
      return h("li", {}, h("button", { type: "button", on: { click: () => choose(item[axis]) } },
        h("span", { className: "faint n" }, String(item[axis])), h("span", { className: "label" }, label(item[axis])),
        h("span", { className: "n" }, human(item.weight)), stick)); // prettier-ignore
    };
    fill(element, h("h2", {}, title), h("ol", { className: "keys" }, items.map(entry)), note ? h("div", { className: "faint" }, note) : null);
  }

  async showProfiles(at, { qLen, kLen }) {
    this.profiled = at;
    let found;
    try {
      found = await json(`/api/profile/${at}`);
    } catch (error) {
      return this.announce(say("failed", { error: error.message }), true);
    }
    if (this.profiled !== at) return;
    const shown = [];
    const per = (values, length) => length / values.length; // entries a bin
    const span = (values, length) => (n) => (per(values, length) > 1 ? `${Math.floor(n * per(values, length))}…` : String(n));
    if (found.mass) {
      const step = (qLen + kLen - 1) / found.mass.length;
      const zero = (0 - found.first) / step - 0.5;
      const near = step > 1 ? (n) => `δ ≈ ${Math.round(found.first + (n + 0.5) * step)}` : (n) => `δ = ${found.first + n}`;
      shown.push(chart(say("profile"), found.mass, { nameOf: near, zero, colour: "delta", id: "chart-mass" }));
    }
    const toQuery = (n) => this.look(Math.floor(n * per(found.entropy, qLen)), null);
    const toKey = (n) => this.look(null, Math.floor(n * per(found.received, kLen)));
    shown.push(chart(say("entropy"), found.entropy, { nameOf: span(found.entropy, qLen), colour: "query", choose: toQuery, id: "chart-entropy" }));
    shown.push(chart(say("received"), found.received, { nameOf: span(found.received, kLen), colour: "key", choose: toKey, id: "chart-received" }));
    const names = { self: "selfShare", previous: "previous", first: "first", induction: "induction", toeplitz: "toeplitz" };
    const shares = Object.entries(found.shares ?? {}).filter(([name, value]) => value !== null && name in names);
    const list = shares.map(([name, value]) => [h("dt", {}, say(names[name])), h("dd", { data: { share: name } }, human(value, true))]);
    this.profiles.dataset.state = found.exact ? "exact" : "sample";
    fill(this.profiles, found.exact ? null : h("span", { className: "badge sample" }, say("sampleNote", { percent: Math.floor(100 * found.progress) })), ...shown, shares.length ? [h("h2", {}, say("shares")), h("dl", { className: "shares" }, list.flat())] : null);
  }
}
