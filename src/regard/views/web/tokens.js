// The text itself, each token shaded by the weight the query looked at gives it.

import { human } from "./colour.js";
import { fill, h } from "./dom.js";
import { say } from "./words.js";

const MOST = 1200; // tokens written at a time: around the key looked at when there are more

export class Tokens {
  /** `weights(i, from, count)` gives the weights of query i for some keys. */
  constructor(element, { look, weights }) {
    [this.element, this.look, this.weights] = [element, look, weights];
  }

  open(at, kLen, labels) {
    [this.at, this.kLen, this.labels, this.start, this.pair] = [at, kLen, labels, 0, null];
    this.write();
  }

  write() {
    const end = Math.min(this.kLen, this.start + MOST);
    this.buttons = [];
    for (let j = this.start; j < end; j++) {
      const act = () => this.look(null, j);
      this.buttons.push(h("button", { type: "button", className: "token", tabIndex: -1, data: { j }, on: { click: act } }, this.labels.get("k", j)));
    }
    const ends = [this.start > 0 ? "… " : null, end < this.kLen ? " …" : null];
    fill(this.element, h("h2", {}, say("tokens")), ends[0], ...this.buttons, ends[1]);
    this.row = null; // the new ones are not shaded yet
  }

  /** Labels have come: write them, shaded as before. */
  async rewrite() {
    this.write();
    await this.show(this.pair);
  }

  async show(pair) {
    if (!pair) return;
    this.pair = pair;
    const far = pair.j < this.start || pair.j >= this.start + MOST;
    if (far) {
      this.start = Math.max(0, Math.min(this.kLen - MOST, pair.j - MOST / 2));
      this.write();
    }
    const key = `${this.at}/${pair.i}`;
    if (this.row !== key) {
      this.row = key;
      const weights = await this.weights(pair.i, this.start, MOST);
      if (this.row !== key) return;
      const top = weights.reduce((most, x) => (x > most ? x : most), 1e-12);
      this.buttons.forEach((button, n) => {
        button.style.backgroundColor = `rgb(var(--shade) / ${(0.85 * weights[n]) / top})`;
        button.title = `${button.dataset.j} “${button.textContent}”: ${human(weights[n])}`;
        button.dataset.weight = weights[n];
      });
    }
    for (const button of this.buttons) {
      button.classList.toggle("key", Number(button.dataset.j) === pair.j);
      button.classList.toggle("query", Number(button.dataset.j) === pair.i);
    }
  }
}
