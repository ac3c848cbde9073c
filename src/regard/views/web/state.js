// What the page shows, kept in its address: a link restores it, back and forward walk through it.

const START = {
  source: "", look: 0, head: 0, i: null, j: null, u: null, v: null, z: null, turned: false,
  what: "weights", scale: "linear", map: "viridis", pooling: "mean", hideFirst: false,
  grid: false, deep: false, picture: "both", with: "", lang: "", theme: "",
}; // prettier-ignore

const short = {
  source: "s", look: "l", head: "h", i: "i", j: "j", u: "u", v: "v", z: "z", turned: "t",
  what: "w", scale: "n", map: "c", pooling: "p", hideFirst: "f", grid: "g", deep: "deep", picture: "picture", with: "x", lang: "lang", theme: "theme",
}; // prettier-ignore

export function readAddress(hash = location.hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const state = { ...START };
  for (const [name, key] of Object.entries(short)) {
    if (!given.has(key)) continue;
    const text = given.get(key);
    const first = START[name];
    if (typeof first === "boolean") state[name] = text === "1";
    else if (typeof first === "number" || first === null) state[name] = Number.isFinite(Number(text)) ? Number(text) : first;
    else state[name] = text;
  }
  return state;
}

export function address(state) {
  const given = new URLSearchParams();
  for (const [name, key] of Object.entries(short)) {
    const value = state[name];
    if (value === START[name] || value === null || value === undefined) continue;
    const digits = name === "z" ? 6 : 1;
    const text = typeof value === "boolean" ? "1" : typeof value === "number" && !Number.isInteger(value) ? value.toFixed(digits) : value;
    given.set(key, text);
  }
  return `#${given}`;
}

let timer = 0;
/** Write the state into the address, at most a few times a second. */
export function remember(state) {
  clearTimeout(timer);
  timer = setTimeout(() => history.replaceState(null, "", address(state)), 150);
}
