// Colours of numbers: maps that are safe for colour-blind eyes, and the scales that bring a number into 0..1.

// 33 colours each, six hexadecimal digits a colour; between them colours are mixed. Viridis and cividis are CC0.
const ANCHORS = {
  viridis: "440154470d6048186a482374472d7b4537814240863e49893b528b375b8d33638d2f6b8e2c728e297a8e26828e23898e21918c1f988b1fa08822a78528ae8032b67a3fbc734ec36b5ec96270cf5784d44b98d83eaddc30c2df23d8e219ece51bfde725",
  cividis: "00224e00285b002e6a0533711a386f273e6e32436d3b496c434e6c4b546c535a6d5a5f6e61656f686a716f70737676767d7c788482798c8878938e789b9476a39a74aba072b4a76fbcae6cc4b468cdbb63d5c25edec958e7d150f0d846f9e03afee838",
  grey: "fffffff8f8f8f0f0f0e9e9e9e2e2e2dadadad3d3d3ccccccc4c4c4bdbdbdb6b6b6aeaeaea7a7a7a0a0a09898989191918a8a8a8282827b7b7b7373736c6c6c6565655d5d5d5656564f4f4f4747474040403939393131312a2a2a2323231b1b1b141414",
};

export const MAPS = Object.keys(ANCHORS);
export const SCALES = ["linear", "log", "row"];
const DECADES = 4; // what the logarithmic scale shows below its largest number

/** 256 colours of a map, each as one number for the pixels of an image (little-endian RGBA). */
export function palette(name) {
  const digits = ANCHORS[name] ?? ANCHORS.viridis;
  const anchor = (n, part) => parseInt(digits.slice(6 * n + 2 * part, 6 * n + 2 * part + 2), 16);
  const colours = new Uint32Array(256);
  for (let n = 0; n < 256; n++) {
    const at = (n / 255) * 32;
    const low = Math.min(31, Math.floor(at));
    const mixed = [0, 1, 2].map((part) => Math.round(anchor(low, part) + (at - low) * (anchor(low + 1, part) - anchor(low, part))));
    colours[n] = (255 << 24) | (mixed[2] << 16) | (mixed[1] << 8) | mixed[0];
  }
  return colours;
}

/** One colour of a palette, as CSS. */
export function css(colours, share) {
  const c = colours[Math.max(0, Math.min(255, Math.round(share * 255)))];
  return `rgb(${c & 255} ${(c >> 8) & 255} ${(c >> 16) & 255})`;
}

/** From a number to 0..1: `range` is {low, high}; on the row scale `peak` is the largest number of the row. */
export function shareOf(scale, value, range, peak) {
  if (scale === "log") return 1 + Math.log10(value / range.high) / DECADES;
  if (scale === "row") return value / peak;
  return (value - range.low) / (range.high - range.low);
}

/** The inverse, for the marks of a colour bar. */
export function valueAt(scale, share, range) {
  if (scale === "log") return range.high * 10 ** (DECADES * (share - 1));
  if (scale === "row") return share;
  return range.low + share * (range.high - range.low);
}

/** A number for people: few digits, never a wall of zeros. */
export function human(x, percent = false) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  const y = percent ? 100 * x : x;
  const size = Math.abs(y);
  const text = size === 0 ? "0" : size >= 1e5 || size < 1e-3 ? y.toExponential(2).replace(".00e", "e") : String(Number(y.toPrecision(4)));
  return text.replace("-", "−") + (percent ? " %" : "");
}

/** A number in as few characters as fit into a cell of the map. */
export function brief(x, percent) {
  const y = percent ? 100 * x : x;
  if (!Number.isFinite(y)) return y < 0 ? "−∞" : "∞";
  const size = Math.abs(y);
  const text = size >= 100 ? y.toFixed(0) : size >= 10 ? y.toFixed(1) : size >= 0.005 ? y.toFixed(2) : size === 0 ? "0" : y.toExponential(0);
  return text.replace("-", "−").replace(/^(−?)0\./, "$1.");
}

/** Draw a colour bar with its marks. `ink` is the colour of the text. */
export function drawBar(canvas, { map, scale, range, percent, ink }) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const colours = palette(map);
  const bar = { left: 8, width: Math.max(1, width - 16), height: 12 };
  for (let x = 0; x < bar.width; x++) {
    pen.fillStyle = css(colours, x / bar.width);
    pen.fillRect(bar.left + x, 0, 1.5, bar.height);
  }
  pen.fillStyle = ink;
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "top";
  for (const share of [0, 0.5, 1]) {
    pen.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center";
    const text = human(valueAt(scale, share, range), percent || scale === "row");
    const above = share === 1 && scale !== "row" && range.top > range.high; // some are larger than the last colour
    pen.fillText(above ? `≥ ${text}` : text, bar.left + share * bar.width, bar.height + 3);
  }
}
