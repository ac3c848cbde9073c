// The page: what is open, one head large (or two beside each other), all heads small, and what is known of a pair.

import { MAPS, SCALES, drawBar, human } from "./colour.js";
import { fill, h, ink } from "./dom.js";
import { GridView } from "./gridview.js";
import { AttentionMap } from "./map.js";
import { Overview, nameOf } from "./overview.js";
import { Panels } from "./panels.js";
import { Labels, json, post, provider, weights } from "./server.js";
import { readAddress, remember } from "./state.js";
import { Tokens } from "./tokens.js";
import { LANGUAGES, say, speak, spoken } from "./words.js";

const $ = (id) => document.getElementById(id);
const WHAT = ["weights", "logits", "percent"];
const POOLING = ["mean", "max"];
const next = (list, now) => list[(list.indexOf(now) + 1) % list.length];

const state = readAddress();
let sources = { sources: [], models: [], limits: {} };
let source = null; // what /api/source said of the open one
let stage = []; // the maps: {map, figure, at, look, head, source}
let gridView = null;
let overview, panels, tokens;

// Beginning

function theme() {
  const wanted = state.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = wanted;
}

async function begin() {
  speak(state.lang || (navigator.language?.startsWith("zh") ? "zh" : "en"));
  theme();
  build();
  sources = await json("/api/sources");
  buildHeader();
  const wanted = sources.sources.find((each) => each.id === state.source) ?? sources.sources[0];
  if (state.source && wanted?.id !== state.source) announce(say("gone"), true);
  listen();
  if (wanted) await openSource(wanted.id, !state.source || wanted.id === state.source);
  else showStart();
}

/** Nothing is open: what one can do. */
function showStart() {
  fill($("maps"), h("div", { id: "start" }, h("h2", {}, say("noSources")), h("p", {}, say("start")), h("p", {}, lessonsLink(say("learn")))));
  announce(say("noSources"));
}

const lessonsLink = (text) => h("a", { href: `/lessons#lang=${spoken()}${state.theme ? `&theme=${state.theme}` : ""}`, className: "button", title: say("learn") }, text);

function build() {
  document.title = say("title");
  overview = new Overview($("overview"), { choose: (look, head) => choose(look, head) });
  panels = new Panels($("panels"), { look: (i, j) => lookAt(i, j), announce });
  tokens = new Tokens($("tokens"), { look: (i, j) => lookAt(i, j), weights: (...some) => weights(tokens.at, ...some) });
  buildHeader();
}

function announce(text, loud = false) {
  $("live").textContent = text;
  if (!loud) return;
  const toast = $("toast");
  [toast.textContent, toast.hidden] = [text, false];
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => (toast.hidden = true), 5000);
}

// Sources

function buildHeader() {
  const options = sources.sources.map((each) => h("option", { value: each.id, selected: each.id === state.source }, each.name));
  const pick = h("select", { id: "source", "aria-label": say("source"), on: { change: (e) => openSource(e.target.value) } }, options);
  const models = sources.models.map((each) => h("option", { value: each.name, selected: each.name === buildHeader.model }, each.reads === "digit" ? `${each.label} (${say("digitHelp")})` : each.label));
  const text = h("input", { type: "text", id: "text", value: $("text")?.value ?? "", "aria-label": say("text"), maxLength: sources.limits?.text ?? 100000 });
  const hint = () => {
    buildHeader.model = model.value;
    text.placeholder = say(sources.models.find((each) => each.name === model.value)?.reads === "digit" ? "digitHint" : "textHint");
  };
  const model = h("select", { id: "model", "aria-label": say("model"), on: { change: hint } }, models);
  hint();
  const read = (event) => {
    event.preventDefault();
    if (text.value.trim()) record(model.value, text.value);
  };
  const file = h("input", { type: "file", id: "file", accept: ".npz,.safetensors,.trace,.regard", on: { change: (e) => upload(e.target.files[0]) } });
  fill(
    $("header"),
    h("h1", {}, "Regard"),
    pick,
    h("form", { on: { submit: read } }, text, model, h("button", { className: "main", type: "submit", id: "go" }, say("look"))),
    h("label", { className: "file", title: say("drop") }, say("open"), file),
    h("div", { className: "end" }, lessonsLink(say("lessons")),
      h("button", { type: "button", id: "language", on: { click: turnLanguage } }, say("language")),
      h("button", { type: "button", id: "theme", title: say("theme"), "aria-label": say("theme"), on: { click: turnTheme } }, "◐"),
      h("button", { type: "button", id: "keys", title: say("help"), "aria-label": say("help"), on: { click: help } }, "?")),
  ); // prettier-ignore
}

async function until(id) {
  for (let wait = 100; ; wait = Math.min(1000, wait * 1.5)) {
    const found = await json(`/api/source/${id}`);
    if (found.state === "failed") throw new Error(found.error);
    if (found.state === "ready") return found;
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function record(model, text) {
  announce(say("recording"), true);
  $("go").disabled = true;
  try {
    const { id } = await post("/api/record", { model, text });
    await until(id);
    sources = await json("/api/sources");
    await openSource(id);
  } catch (error) {
    announce(say("failed", { error: error.message }), true);
  }
  $("go").disabled = false;
}

async function upload(file) {
  if (!file) return;
  announce(say("opening", { name: file.name }), true);
  try {
    const { id } = await post(`/api/upload?name=${encodeURIComponent(file.name)}`, file, "application/octet-stream");
    await until(id);
    sources = await json("/api/sources");
    await openSource(id);
  } catch (error) {
    announce(say("failed", { error: error.message }), true);
  }
}

async function openSource(id, keep = false) {
  source = await until(id);
  if (!keep) Object.assign(state, { source: id, look: 0, head: source.looks[0]?.heads[0] ?? 0, i: null, j: null, u: null, v: null, z: null, with: "", grid: false });
  if (!source.looks[state.look]?.heads.includes(state.head)) Object.assign(state, { look: 0, head: source.looks[0].heads[0] });
  state.source = id;
  buildHeader();
  overview.show(id, source.looks, `${state.look}/${state.head}`, state.map).catch((error) => announce(say("failed", { error: error.message }), true));
  await openMaps();
}

function choose(look, head) {
  const before = source.looks[state.look];
  const after = source.looks[look];
  const same = before.q_len === after.q_len && before.k_len === after.k_len;
  Object.assign(state, { look, head });
  if (!same) Object.assign(state, { i: null, j: null, u: null, v: null, z: null });
  openMaps();
}

// The stage: one map, or two beside each other

async function openMaps() {
  const serial = (openMaps.serial = (openMaps.serial ?? 0) + 1);
  const wanted = [{ source, look: state.look, head: state.head }];
  if (state.with) {
    const [id, look, head] = state.with.split("/");
    try {
      wanted.push({ source: id === source.id ? source : await until(id), look: Number(look), head: Number(head) });
    } catch {
      state.with = "";
    }
  }
  const opened = [];
  try {
    for (const each of wanted) {
      const labels = new Labels(each.source.id, each.look, () => labelled(labels), each.source.looks[each.look].geometry);
      await labels.begin();
      opened.push({ ...each, labels, provider: await provider(each.source.id, each.look, each.head, labels) });
    }
  } catch (error) {
    return announce(say("failed", { error: error.message }), true);
  }
  if (serial !== openMaps.serial) return;
  for (const old of stage) old.map?.close();
  gridView?.close();
  gridView = null;
  stage = opened;
  buildToolbar();
  const figures = stage.map((each) => {
    each.at = each.provider.at;
    each.canvas = h("canvas", { tabIndex: 0, role: "application", "aria-label": `A: ${captionOf(each)}`, "aria-describedby": "readout", data: { at: each.at } });
    each.value = h("b", { className: "number", data: { at: each.at } });
    each.caption = h("figcaption", {}, each.value, captionOf(each));
    return h("figure", {}, each.caption, each.canvas);
  });
  const geometry = source.looks[state.look].geometry;
  if (state.grid && geometry) {
    const place = h("figure", { id: "grid" });
    fill($("maps"), figures[0], place);
    const keep = (name, value) => ((state[name] = value), remember(state));
    gridView = new GridView(place, { look: (i, j, how) => lookAt(i, j, how), announce, deep: state.deep, picture: state.picture, set: keep });
    gridView.open(stage[0].at, geometry, state.map).catch((error) => announce(say("failed", { error: error.message }), true));
  } else fill($("maps"), ...figures);
  stage.forEach((each, n) => startMap(each, n));
  window.regard = { map: stage[0].map, stage, state, overview, tokens, panels, gridView }; // for tests and for the curious
  overview.mark(`${state.look}/${state.head}`, state.map);
  $("tokens").hidden = Boolean(geometry && !stage[0].labels.named); // cells of an image are shown in its grid
  tokens.open(stage[0].at, stage[0].provider.kLen, stage[0].labels);
  panels.clear();
  panels.showProfiles(stage[0].at, stage[0].provider);
  if (state.i !== null && state.j !== null) stage[0].map.look(state.i, state.j, { lock: true, reveal: state.u === null });
  watch();
  remember(state);
}

const captionOf = ({ source, look, head, provider }) =>
  `${nameOf(source.looks[look])} · ${say("head")} ${head} · ${source.name} · ${say("lengths", { q: provider.qLen, k: provider.kLen })}`;

function mapOptions() {
  return {
    what: state.what, scale: state.scale, map: state.map, pooling: state.pooling, hideFirst: state.hideFirst,
    axes: { q: say("query"), k: say("key") },
  }; // prettier-ignore
}

function startMap(each, n) {
  const map = (each.map = new AttentionMap(each.canvas, each.provider, mapOptions()));
  if (state.turned) map.turn();
  if (state.u !== null && state.z !== null) {
    map.view.state = { u: state.u, v: state.v, scale: state.z, transposed: state.turned };
    map.changed();
  }
  const others = () => stage.filter((other) => other !== each);
  map.addEventListener("hover", ({ detail }) => {
    for (const other of others()) other.map?.link(detail);
    compareAt(detail ?? map.locked);
    if (n === 0) shown(detail ?? map.locked, !detail && Boolean(map.locked));
  });
  map.addEventListener("lock", ({ detail }) => {
    for (const other of others()) other.map?.link(detail);
    compareAt(detail);
    if (n !== 0) return;
    Object.assign(state, { i: detail?.i ?? null, j: detail?.j ?? null });
    remember(state);
    shown(detail, true);
  });
  map.addEventListener("view", ({ detail }) => {
    if (n !== 0) return;
    const whole = detail.scale <= map.view.fitting * 1.0001;
    Object.assign(state, whole ? { u: null, v: null, z: null } : { u: detail.u, v: detail.v, z: detail.scale });
    state.turned = detail.transposed;
    for (const other of others()) {
      if (other.map && other.provider.qLen === each.provider.qLen && other.provider.kLen === each.provider.kLen) {
        other.map.view.state = detail;
        other.map.changed(false);
      }
    }
    remember(state);
  });
  map.addEventListener("range", bar);
  if (n === 0) bar();
  map.addEventListener("drawn", () => n === 0 && tellState());
  map.addEventListener("trouble", ({ detail }) => announce(say("failed", { error: detail.message }), true));
}

function shown(pair, locked) {
  if (!pair) return;
  const first = stage[0];
  const label = (side, n) => first.labels.get(side, n);
  panels.show(first.at, pair, label, { what: state.what, locked });
  tokens.show(pair).catch((error) => announce(say("failed", { error: error.message }), true));
  gridView?.show(pair);
}

/** Of two maps: the weight of the same pair in each, beside their names. */
async function compareAt(pair) {
  if (stage.length < 2) return;
  const serial = (compareAt.serial = (compareAt.serial ?? 0) + 1);
  await new Promise((done) => setTimeout(done, 60));
  if (serial !== compareAt.serial) return;
  await Promise.all(stage.map(async (each) => {
    const there = pair && pair.i < each.provider.qLen && pair.j < each.provider.kLen;
    const found = there ? (await weights(each.at, pair.i, pair.j, 1).catch(() => [null]))[0] : null;
    if (serial !== compareAt.serial) return;
    each.value.textContent = there ? `A[${pair.i}, ${pair.j}] = ${human(found, state.what === "percent")} · ` : "";
    Object.assign(each.value.dataset, { value: found ?? "", pair: there ? `${pair.i}/${pair.j}` : "" });
  })); // prettier-ignore
}

/** More labels have come. */
function labelled(labels) {
  redraw();
  if (stage[0]?.labels !== labels || tokens.labels !== labels) return;
  tokens.rewrite();
  shown(stage[0].map?.locked, true);
}

/** Look at a query, a key, or both; what is null stays. */
function lookAt(i, j, { lock = true } = {}) {
  const map = stage[0]?.map;
  if (!map) return;
  const now = map.cursor ?? map.locked ?? { i: 0, j: 0 };
  map.look(i ?? now.i, j ?? now.j, { lock });
}

function redraw() {
  for (const each of stage) each.map?.changed(false);
}

function bar() {
  const map = stage[0]?.map;
  if (map) drawBar($("bar"), { map: state.map, scale: state.what === "logits" ? "linear" : state.scale, range: map.range, percent: state.what === "percent", ink: ink("ink") });
}

// How far the exact pass is: the maps' samples are asked for again as it goes on

let watching = 0;
async function watch() {
  const serial = ++watching;
  for (let wait = 500; ; wait = Math.min(3000, 1.2 * wait)) {
    // less and less often: each new picture takes time from the pass itself
    const about = await Promise.all(stage.map((each) => each.provider.progress().catch(() => null)));
    if (serial !== watching) return;
    stage.forEach((each, n) => {
      if (!about[n]) return;
      // logits have a pass of their own, which begins when a coarse tile of them is first asked for
      const progress = state.what === "logits" ? (about[n].passes.logits ?? Number(each.map.exact)) : about[n].progress;
      const moved = each.progress !== progress;
      [each.progress, each.exact] = [progress, progress >= 1];
      if (moved) each.map.refresh();
    });
    tellState();
    if (stage.every((each, n) => !about[n] || each.exact)) {
      if (state.what !== "logits") panels.showProfiles(stage[0].at, stage[0].provider);
      return;
    }
    await new Promise((done) => setTimeout(done, wait));
    if (serial !== watching) return;
  }
}

function tellState() {
  const first = stage[0];
  if (!first?.map) return;
  const percent = Math.floor(100 * (first.progress ?? 0));
  const exact = first.exact || first.map.exact;
  const key = `${exact}/${percent}/${first.exact}/${first.map.cell}/${spoken()}`;
  if (tellState.key === key) return;
  tellState.key = key;
  const cell = first.map.cell > 1 ? h("span", {}, `${first.map.cell} × ${first.map.cell}`) : null;
  fill(
    $("progress"),
    h("span", { className: `badge ${exact ? "exact" : "sample"}`, id: "exactness" }, exact ? say("exactNote") : say("sampleNote", { percent })),
    first.exact ? null : h("progress", { max: 100, value: percent, "aria-label": say("progress", { percent }) }),
    cell,
  );
}

// What the user sets

function set(name, value) {
  state[name] = value;
  for (const each of stage) each.map?.set(name, value);
  if (name === "map") overview.mark(`${state.look}/${state.head}`, value);
  if (name === "map" && gridView) gridView.open(stage[0].at, source.looks[state.look].geometry, value);
  buildToolbar();
  bar();
  if (name === "what") {
    shown(stage[0]?.map?.locked, true);
    watch();
  }
  remember(state);
}

function buildToolbar() {
  const focused = document.activeElement?.id;
  const looks = source.looks;
  const now = looks[state.look];
  const select = (id, name, options, value, change) =>
    h("label", {}, say(name), h("select", { id, on: { change: (e) => change(e.target.value) } }, options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text))));
  const press = (id, name, on, act) => h("button", { type: "button", id, "aria-pressed": String(on), on: { click: act } }, say(name));
  const plain = (id, name, text, act) => h("button", { type: "button", id, title: say(name), "aria-label": say(name), on: { click: act } }, text);
  const words = (list) => list.map((each) => [each, say(each)]);
  fill(
    $("toolbar"),
    select("layer", "layer", looks.map((look, n) => [n, nameOf(look)]), state.look, (n) => choose(Number(n), looks[n].heads.includes(state.head) ? state.head : looks[n].heads[0])),
    select("head", "head", now.heads.map((n) => [n, String(n)]), state.head, (n) => choose(state.look, Number(n))),
    select("what", "what", words(WHAT), state.what, (x) => set("what", x)),
    select("scale", "scale", words(SCALES), state.scale, (x) => set("scale", x)),
    select("colours", "colours", words(MAPS), state.map, (x) => set("map", x)),
    select("pooling", "pooling", words(POOLING), state.pooling, (x) => set("pooling", x)),
    press("hide-first", "hideFirst", state.hideFirst, () => set("hideFirst", !state.hideFirst)),
    press("turn", "turn", state.turned, turn),
    plain("zoom-in", "zoomIn", "+", () => stage[0].map.zoom(1.6)),
    plain("zoom-out", "zoomOut", "−", () => stage[0].map.zoom(1 / 1.6)),
    plain("fit", "fit", say("fit"), () => stage[0].map.fit()),
    now.geometry ? press("grid-view", "gridView", state.grid, turnGrid) : null,
    press("compare", "compare", Boolean(state.with), turnCompare),
    state.with ? compareSelect() : null,
  ); // prettier-ignore
  if (focused && focused !== document.activeElement?.id) $(focused)?.focus();
}

function compareSelect() {
  const options = [];
  for (const each of sources.sources) {
    const looks = each.id === source.id ? source.looks : (each.looks ?? []);
    looks.forEach((look, n) => {
      for (const head of look.heads ?? []) options.push([`${each.id}/${n}/${head}`, `${each.id === source.id ? "" : `${each.name} · `}${nameOf(look)} · ${say("head")} ${head}`]);
    });
  }
  const entries = options.map(([value, text]) => h("option", { value, selected: value === state.with }, text));
  return h("select", { id: "with", "aria-label": say("compareWith"), on: { change: (e) => ((state.with = e.target.value), openMaps()) } }, entries);
}

function turn() {
  for (const each of stage) each.map.turn();
  state.turned = stage[0].map.view.transposed;
  buildToolbar();
}

function turnGrid() {
  state.grid = !state.grid;
  state.with = "";
  openMaps();
}

function turnCompare() {
  const heads = source.looks[state.look].heads;
  state.with = state.with ? "" : `${source.id}/${state.look}/${next(heads, state.head)}`;
  state.grid = false;
  openMaps();
}

function turnLanguage() {
  state.lang = next(LANGUAGES, spoken());
  speak(state.lang);
  document.title = say("title");
  tellState.key = "";
  buildHeader();
  if (!source) return showStart();
  overview.show(source.id, source.looks, `${state.look}/${state.head}`, state.map);
  openMaps();
}

function turnTheme() {
  state.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  theme();
  buildHeader();
  remember(state);
  if (!source) return;
  redraw();
  bar();
  panels.showProfiles(stage[0].at, stage[0].provider);
  gridView?.draw();
}

function stepHead(by) {
  const heads = source.looks[state.look].heads;
  const at = heads.indexOf(state.head) + by;
  if (at >= 0 && at < heads.length) return choose(state.look, heads[at]);
  const look = state.look + Math.sign(by);
  if (look >= 0 && look < source.looks.length) choose(look, by > 0 ? source.looks[look].heads[0] : source.looks[look].heads.at(-1));
}

function stepLayer(by) {
  const look = state.look + by;
  if (look < 0 || look >= source.looks.length) return;
  choose(look, source.looks[look].heads.includes(state.head) ? state.head : source.looks[look].heads[0]);
}

const KEYS = {
  "[": () => stepHead(-1), "]": () => stepHead(1), "{": () => stepLayer(-1), "}": () => stepLayer(1),
  w: () => set("what", next(WHAT, state.what)), s: () => set("scale", next(SCALES, state.scale)),
  c: () => set("map", next(MAPS, state.map)), m: () => set("pooling", next(POOLING, state.pooling)),
  f: () => set("hideFirst", !state.hideFirst), t: turn,
  g: () => source.looks[state.look].geometry && turnGrid(), x: turnCompare,
  "/": () => $("text").focus(), l: turnLanguage, d: turnTheme, "?": help,
}; // prettier-ignore

const HELP = [
  ["← → ↑ ↓", "k_arrows"], ["+ − 0", "k_zoom"], ["z", "k_single"], ["Enter, Esc", "k_lock"], ["[ ]", "k_heads"], ["{ }", "k_layers"],
  ["w", "k_show"], ["s", "k_scale"], ["c", "k_colours"], ["m", "k_pooling"], ["f", "k_first"], ["t", "k_turn"], ["g", "k_grid"], ["x", "k_compare"],
  ["/", "k_text"], ["l", "k_language"], ["d", "k_theme"], ["?", "k_help"],
]; // prettier-ignore

function help() {
  const rows = HELP.flatMap(([keys, what]) => [h("dt", {}, h("kbd", {}, keys)), h("dd", {}, say(what))]);
  const close = h("button", { type: "button", className: "main", on: { click: () => $("help").close() } }, say("close"));
  fill($("help"), h("h1", {}, say("help")), h("dl", {}, rows), h("p", { className: "faint" }, say("drop")), close);
  $("help").showModal();
}

function listen() {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, dialog[open]"); // focus may stay in one that was just closed
    if (event.key === "Escape" && typing?.id === "text") return stage[0]?.canvas.focus();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const act = KEYS[event.key];
    if (act && (source || ["/", "l", "d", "?"].includes(event.key))) {
      event.preventDefault();
      act();
    } else if (!["Tab", "Enter", " "].includes(event.key) && stage[0]?.map && event.target === document.body) stage[0].map.press(event);
  });
  addEventListener("hashchange", async () => {
    Object.assign(state, readAddress());
    speak(state.lang || spoken());
    theme();
    if (state.source && state.source !== source?.id) await openSource(state.source, true).catch((error) => announce(error.message, true));
    else openMaps();
  });
  addEventListener("resize", bar);
  for (const name of ["dragover", "drop", "dragleave"])
    addEventListener(name, (event) => {
      event.preventDefault();
      document.body.classList.toggle("dropping", name === "dragover");
      if (name === "drop") upload(event.dataTransfer.files[0]);
    });
}

begin().catch((error) => announce(say("failed", { error: error.message }), true));
