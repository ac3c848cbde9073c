// The stage of a lesson's picture: what the reader has put in, what the server made of it, and the words to say it with.
//
// A lesson's module exports `start(stage)`, which puts its controls and pictures into `stage.element` and returns a function
// that draws an answer. `stage.answer` is there when it is called. A control calls `stage.set({factor: 2})`; the server is asked
// (never twice at once: the newest inputs go when the answer before has come), and what it says is drawn.

import { fill, h } from "./dom.js";
import { ask, post } from "./server.js";

export class Stage {
  constructor(element, { name, says, language, given, say, announce, remember, blocks }) {
    Object.assign(this, { name, says, language, announce, remember, blocks, page: say });
    this.touched = given; // the inputs that are not the lesson's own
    [this.answer, this.draw, this.wanted, this.done, this.closed] = [null, null, 0, 0, false];
    this.element = h("div", { className: "stage" });
    this.note = h("p", { className: "trouble", role: "alert", hidden: true });
    this.again = h("button", { type: "button", id: "again", on: { click: () => this.reset() } }, say("again"));
    fill(element, h("div", { className: "stage-head" }, h("h3", {}, say("play")), this.again), this.note, this.element);
    this.place = element;
  }

  /** One of the lesson's own words, `play_...`, with its numbers. */
  say(key, numbers = {}) {
    if (!(key in this.says)) throw new Error(`no words play_${key} in ${this.name}`);
    return this.says[key].replace(/\{(\w+)\}/g, (_, place) => String(numbers[place] ?? ""));
  }

  /** All inputs: the answer's, and over them what has been changed since. */
  get inputs() {
    return { ...this.answer?.inputs, ...this.touched };
  }

  get bounds() {
    return this.answer?.bounds ?? {};
  }

  get settled() {
    return this.answer !== null && this.done === this.wanted && this.draw !== null;
  }

  async begin(module) {
    this.module = module;
    this.wanted += 1;
    try {
      this.answer = await this.play(this.touched);
    } catch (error) {
      if (this.closed) return;
      this.trouble(error); // the address asks for what cannot be: say so, and begin anew
      this.touched = {};
      this.remember();
      this.answer = await this.play({});
    }
    if (this.closed) return;
    this.draw = await module.start(this);
    this.draw(this.answer);
    this.done = this.wanted;
  }

  /** Change inputs; the picture follows. What is undefined becomes the lesson's own again. */
  set(changes) {
    for (const [key, value] of Object.entries(changes)) {
      if (value !== undefined) this.touched[key] = value;
      else {
        delete this.touched[key];
        if (this.answer) delete this.answer.inputs[key];
      }
    }
    this.remember();
    this.follow();
  }

  /** As it was at first. */
  async reset() {
    for (const key of Object.keys(this.touched)) delete this.touched[key];
    this.trouble(null);
    this.remember();
    this.cancel?.abort();
    const wanted = (this.wanted += 1);
    try {
      const answer = await this.play({});
      if (this.closed || wanted !== this.wanted) return;
      this.answer = answer;
      fill(this.element);
      this.draw = await this.module.start(this);
      this.draw(this.answer);
    } catch (error) {
      this.trouble(error);
    }
    this.done = wanted;
  }

  /** The same once more: the colours of the page have changed. */
  repaint() {
    if (this.answer && this.draw) this.draw(this.answer);
  }

  play(inputs) {
    return post(`/api/lesson/${this.name}/play?lang=${this.language}`, inputs);
  }

  async follow() {
    this.wanted += 1;
    if (this.asking) return;
    this.asking = true;
    const slow = setTimeout(() => this.place.setAttribute("aria-busy", "true"), 400);
    while (this.done !== this.wanted && !this.closed) {
      const wanted = this.wanted;
      try {
        const answer = await this.play(this.touched);
        if (this.closed) break;
        this.answer = answer;
        this.trouble(null);
        this.draw(answer);
      } catch (error) {
        this.trouble(error);
      }
      this.done = wanted;
    }
    clearTimeout(slow);
    this.place.removeAttribute("aria-busy");
    this.asking = false;
  }

  /** A computation that takes seconds: `each` is called with every state. Resolves when it has ended or was cancelled. */
  async stream(inputs, each) {
    this.cancel?.abort();
    const mine = (this.cancel = new AbortController());
    try {
      const answer = await ask(`/api/lesson/${this.name}/stream?lang=${this.language}`, {
        method: "POST", body: JSON.stringify(inputs), headers: { "Content-Type": "application/json" }, signal: mine.signal,
      }); // prettier-ignore
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ; ) {
        const { done, value } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          const state = JSON.parse(line);
          if (state.error) throw new Error(state.error);
          if (!this.closed) each(state);
        }
      }
    } catch (error) {
      if (error.name !== "AbortError") this.trouble(error);
    }
  }

  /** Say what is wrong with the inputs, or that nothing is. */
  trouble(error) {
    this.note.hidden = !error;
    this.note.textContent = error ? this.page("failed", { error: error.message }) : "";
  }

  /** Read something out. */
  tell(text) {
    clearTimeout(this.telling);
    this.telling = setTimeout(() => this.announce(text), 250);
  }

  close() {
    this.closed = true;
    this.cancel?.abort();
    clearTimeout(this.telling);
  }
}
