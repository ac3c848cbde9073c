// The lessons' pages: a list of them, and one page each. What a lesson says and shows comes from the server; its picture that
// answers is a module of its own, lesson_<name>.js, which is given a stage (lesson_stage.js).
//
// The address says which lesson, and after the # the language, the theme, and what the reader has put in.

import { fill, h } from "./dom.js";
import { block, marked } from "./lesson_blocks.js";
import { Stage } from "./lesson_stage.js";
import { json } from "./server.js";

const $ = (id) => document.getElementById(id);
const LANGUAGES = ["en", "zh"];
const SETTINGS = ["lang", "theme"];
const WRITTEN = "input:not([type=range], [type=radio], [type=checkbox]), textarea, select"; // where letters are letters
const name = location.pathname.split("/")[2] ?? "";
let [settings, given, words, lessons, stage] = [{}, {}, {}, [], null];

// The address

/** What the part after the # says: settings of the page, and what was put into the picture. */
function readAddress() {
  const found = [...new URLSearchParams(location.hash.slice(1))];
  settings = Object.fromEntries(found.filter(([key]) => SETTINGS.includes(key)));
  given = Object.fromEntries(found.filter(([key]) => !SETTINGS.includes(key)).map(([key, text]) => [key, valueOf(text)]));
}

/** Numbers, lists and truths are written as JSON, words as they are. */
function valueOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function textOf(value) {
  return typeof value === "string" && valueOf(value) === value ? value : JSON.stringify(value);
}

function address(path, inputs = {}) {
  const parts = [...Object.entries(settings), ...Object.entries(inputs).map(([key, value]) => [key, textOf(value)])];
  return parts.length ? `${path}#${new URLSearchParams(parts)}` : path;
}

const remember = () => history.replaceState(null, "", address(location.pathname, stage?.touched));

const language = () => (LANGUAGES.includes(settings.lang) ? settings.lang : navigator.language?.startsWith("zh") ? "zh" : "en");

// The page

function theme() {
  document.documentElement.dataset.theme = settings.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

const say = (key, numbers = {}) => (words[key] ?? key).replace(/\{(\w+)\}/g, (_, place) => String(numbers[place] ?? ""));

function announce(text, loud = false) {
  $("live").textContent = text;
  if (!loud) return;
  [$("toast").textContent, $("toast").hidden] = [text, false];
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => ($("toast").hidden = true), 6000);
}

function turnLanguage() {
  const given = stage?.touched;
  settings.lang = language() === "en" ? "zh" : "en";
  history.replaceState(null, "", address(location.pathname, given));
  begin();
}

function turnTheme() {
  settings.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  theme();
  remember();
  for (const each of document.querySelectorAll("a[data-path]")) each.href = address(each.dataset.path); // they carry the setting along
  stage?.repaint();
}

const link = (path, content, more = {}) => h("a", { href: address(path), data: { path }, ...more }, content);
const at = () => lessons.findIndex((each) => each.name === name);
const beside = (step) => lessons[at() + step];

function header() {
  fill(
    $("top"),
    h("h1", {}, link("/lessons", name ? `← ${say("lessons")}` : say("lessons"))),
    link("/", say("explorer"), { id: "explorer" }),
    h("div", { className: "end" },
      h("button", { type: "button", id: "language", on: { click: turnLanguage } }, say("language")),
      h("button", { type: "button", id: "theme", title: say("theme"), "aria-label": say("theme"), on: { click: turnTheme } }, "◐")),
  ); // prettier-ignore
  $("skip").textContent = say("skip");
}

function list() {
  document.title = `${say("title")} · Regard`;
  const items = lessons.map((each, n) =>
    h("li", {}, link(`/lessons/${each.name}`, [h("span", { className: "number" }, String(n + 1)), h("span", {}, h("b", {}, each.title), h("span", { className: "faint" }, ...marked(each.shows)))])),
  );
  fill($("lesson"), h("article", {}, h("h2", { className: "title" }, say("title")), h("p", { className: "lead" }, say("shows")), h("ol", { className: "lesson-list" }, items)));
}

/** The lesson's words and pictures. Its picture that answers stands after the first `after` blocks; what it `owns` is left to it. */
function article(told, { owns = () => false, after: first = 0 }, place) {
  const blocks = told.blocks.filter((each) => !owns(each)).map((each) => block(each, say));
  const code = h("pre", { tabIndex: 0 }, h("code", {}, told.code));
  const copy = h("button", { type: "button", id: "copy", on: { click: () => copied(told.code, copy) } }, say("copy"));
  const before = beside(-1);
  const after = beside(1) ?? lessons[0];
  const nearby = (each, text) => link(`/lessons/${each.name}`, text, { className: "button" });
  return h(
    "article",
    {},
    h("h2", { className: "title" }, h("span", { className: "faint" }, `${told.number} / ${lessons.length} `), told.title),
    h("p", { className: "lead" }, ...marked(told.shows)),
    blocks.slice(0, first),
    place,
    blocks.slice(first),
    h("section", { className: "card" }, h("h3", {}, say("try")), h("p", {}, ...marked(told.try)), h("div", { className: "code" }, code, copy)),
    h("section", { className: "card" }, h("h3", {}, say("question")), h("p", { id: "question" }, ...marked(told.question)), h("details", {}, h("summary", {}, say("answer")), h("p", { id: "answer" }, ...marked(told.answer)))),
    h("nav", { className: "onward", "aria-label": say("next") }, before ? nearby(before, `← ${before.title}`) : h("span"), h("span", { className: "faint" }, ...marked(told.next.split("`regard lesson")[0])), nearby(after, `${after.title} →`)),
    h("p", { className: "faint small" }, say("keys")),
  );
}

async function copied(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    getSelection().selectAllChildren($("copy").previousElementSibling); // no clipboard here: it is marked, to be copied by hand
    return announce(say("failed", { error: "clipboard" }), true);
  }
  button.textContent = say("copied");
  announce(say("copied"));
}

async function begin() {
  const serial = (begin.serial = (begin.serial ?? 0) + 1);
  const focused = document.activeElement?.id;
  stage?.close();
  stage = null;
  readAddress();
  theme();
  document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
  ({ words, lessons } = await json(`/api/lessons?lang=${language()}`));
  if (serial !== begin.serial) return;
  header();
  if (!name) return (list(), refocus(focused));
  const slow = setTimeout(() => fill($("lesson"), h("p", { className: "faint" }, say("computing"))), 300); // a model has to read first
  const told = await json(`/api/lesson/${name}?lang=${language()}`).finally(() => clearTimeout(slow));
  if (serial !== begin.serial) return;
  document.title = `${told.title} · Regard`;
  const module = told.plays.length ? await import(`./lesson_${name}.js`).catch(trouble) : null;
  const place = h("section", { id: "play", "aria-label": say("play") });
  fill($("lesson"), article(told, module ?? {}, module ? place : null));
  if (!module) return refocus(focused);
  stage = new Stage(place, { name, says: told.says, language: language(), given, say, announce, remember, blocks: told.blocks });
  window.regard = { stage }; // for tests and for the curious
  await stage.begin(module);
  refocus(focused);
}

/** Where the reader was before the page was written anew in another language. */
function refocus(id) {
  if (id && document.activeElement === document.body) $(id)?.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest(WRITTEN)) return;
  const other = { "[": -1, "]": 1 }[event.key];
  if (other && name && beside(other)) location.href = address(`/lessons/${beside(other).name}`);
  else if (event.key === "l") turnLanguage();
  else if (event.key === "d") turnTheme();
});
$("skip").addEventListener("click", () => $("lesson").focus());
addEventListener("hashchange", () => begin().catch(trouble));
const trouble = (error) => announce(say("failed", { error: error.message }), true);
begin().catch(trouble);
