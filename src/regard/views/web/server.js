// What the server is asked, and a map's numbers from it.

export async function ask(path, options = {}) {
  const answer = await fetch(path, options);
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    throw new Error(told.error ?? `${answer.status} ${answer.statusText}`);
  }
  return answer;
}

export const json = async (path, options) => (await ask(path, options)).json();

export const post = (path, body, type = "application/json") =>
  json(path, { method: "POST", body: type === "application/json" ? JSON.stringify(body) : body, headers: { "Content-Type": type } });

const MAGIC = 0x52474152;

/** A tile from its bytes. */
export function tileOf(buffer) {
  const head = new Uint32Array(buffer, 0, 8);
  if (head[0] !== MAGIC || head[1] !== 1) throw new Error("the server sent something that is not a tile");
  const [rows, cols, flags] = [head[2], head[3], head[4]];
  const part = (start, count) => new Float32Array(buffer, 32 + 4 * start, count);
  const count = rows * cols;
  const first = flags & 4 ? { mean: part(2 * count, rows), max: part(2 * count + rows, rows) } : null;
  return { rows, cols, mean: part(0, count), max: part(count, count), first, exact: Boolean(flags & 1) };
}

/** The weights of query i of a head for some keys. */
export async function weights(at, i, from, count) {
  return new Float32Array(await (await ask(`/api/weights/${at}?i=${i}&from=${from}&count=${count}`)).arrayBuffer());
}

/** The numbers of one head: what map.js asks for. */
export async function provider(source, look, head, labels) {
  const at = `${source}/${look}/${head}`;
  const about = await json(`/api/map/${at}`);
  return {
    at, about, qLen: about.q_len, kLen: about.k_len, levels: about.levels, tile: about.tile,
    label: (side, n) => labels.get(side, n),
    fetchTile: async ({ what, cell, row, col }, signal) =>
      tileOf(await (await ask(`/api/tile/${at}?cell=${cell}&row=${row}&col=${col}&what=${what}`, { signal })).arrayBuffer()),
    rowPeaks: async (cell) => {
      const answer = await ask(`/api/rowmax/${at}?cell=${cell}`);
      const all = new Float32Array(await answer.arrayBuffer());
      const half = all.length / 2;
      return { all: all.slice(0, half), rest: all.slice(half), exact: answer.headers.get("X-Regard-State") !== "sample" };
    },
    progress: () => json(`/api/map/${at}`),
  }; // prettier-ignore
}

const BLOCK = 4096;

/** Labels of a look's queries and keys, fetched in blocks when first needed; numbers, or cells of the grid, where there are none. */
export class Labels {
  constructor(source, look, changed, geometry = null) {
    [this.path, this.changed, this.blocks, this.geometry] = [`/api/labels/${source}/${look}`, changed, new Map(), geometry];
  }

  /** Whether tokens have names of their own. */
  get named() {
    return Boolean(this.blocks.get("k0")?.length);
  }

  place(side, n) {
    if (!this.geometry) return String(n);
    const alone = side === "q" ? this.geometry.q_unplaced - this.geometry.q_start : this.geometry.unplaced - this.geometry.k_start;
    const [at, wide] = [n - alone, this.geometry[side][1]];
    return at < 0 ? String(n) : `(${Math.floor(at / wide)}, ${at % wide})`;
  }

  /** The first block of both sides: enough for short texts. */
  async begin() {
    await Promise.all(["q", "k"].map((side) => this.fetch(side, 0)));
  }

  get(side, n) {
    const block = Math.floor(n / BLOCK);
    const held = this.blocks.get(`${side}${block}`);
    if (held === undefined) this.fetch(side, block);
    return held?.[n - block * BLOCK] ?? this.place(side, n);
  }

  async fetch(side, block) {
    const key = `${side}${block}`;
    this.blocks.set(key, null);
    try {
      this.blocks.set(key, (await json(`${this.path}?side=${side}&from=${block * BLOCK}&count=${BLOCK}`)).labels ?? []);
    } catch {
      this.blocks.delete(key);
    }
    this.changed();
  }
}
