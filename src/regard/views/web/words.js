// Every word of the page, in two languages. A test finds the ones that are missing.

export const WORDS = {
  en: {
    title: "Regard: attention you can look into",
    source: "What is looked at", model: "Model", text: "Text", look: "Look", open: "Open a file",
    drop: "Drop a trace, or a file with q and k (.npz, .safetensors), anywhere on the page.",
    textHint: "Type a text and press Look.", digitHint: "Type a digit, 0 to 9: the model looks at its image.", digitHelp: "a handwritten digit", recording: "The model is reading…", opening: "Opening {name}…",
    overview: "All heads", overviewNote: "click one to enlarge it", sample: "sample", exact: "exact", progress: "{percent} % of the rows",
    sampleNote: "A sample of rows so far: {percent} %", exactNote: "Exact",
    layer: "Layer", head: "Head", query: "query", key: "key", queries: "queries", keys: "keys",
    encoder: "encoder", decoder: "decoder", self: "self", cross: "cross",
    what: "Show", weights: "weights", logits: "logits", percent: "percent",
    scale: "Scale", linear: "linear", log: "log", row: "each row by itself",
    colours: "Colours", viridis: "viridis", cividis: "cividis", grey: "grey",
    pooling: "Cells", mean: "mean", max: "largest",
    hideFirst: "Hide the first key", turn: "Transpose", fit: "All", zoomIn: "Zoom in", zoomOut: "Zoom out",
    gridView: "Grid", mapView: "Map", compare: "Compare", stopCompare: "One map", compareWith: "Compare with",
    pair: "This pair", nothing: "Point at the map, or move with the arrow keys.", locked: "locked",
    weightIs: "weight", logitIs: "logit", ofRow: "number {rank} of its row", hiddenPair: "This query may not look at this key: weight 0.",
    readout: "Query {i} “{q}” gives key {j} “{k}” {weight}.", cellReadout: "Queries {i0} to {i1}, keys {j0} to {j1}: mean {mean}, largest {max}.",
    explain: "Where the logit comes from", lse: "log-sum-exp of the row", softmax: "weight = exp(logit − lse)", share: "its share of the output",
    content: "content", topKeys: "Strongest keys of this query", topQueries: "Who looks at this key most", entropyIs: "entropy {entropy} nats",
    profiles: "Profiles", profile: "Mass by displacement (query − key)", entropy: "Entropy of each query", received: "Mass each key receives",
    shares: "Shares", previous: "previous token", first: "first key", induction: "induction", toeplitz: "Toeplitz", selfShare: "itself",
    does_previous_token: "previous token", does_self: "itself", does_first_key: "first key", does_induction: "induction", does_sink: "sink",
    does_wide: "wide", does_by_distance: "by distance", does_sharp: "sharp", does_mixed: "mixed",
    tokens: "The text, shaded by the row looked at",
    gridNote: "Query cell orange, key cell green, displacement red.", flat: "flat", perspective: "perspective", delta: "displacement",
    massAt: "mass on δ", noPlace: "One of them has no place on the grid.", picture: "What the cells show",
    picture_both: "image and weights", picture_weights: "weights", picture_image: "image",
    deltaTable: "Mass by displacement (rows, columns)",
    language: "中文", theme: "Light or dark", help: "Keys", close: "Close", failed: "That did not work: {error}", gone: "That is no longer there; showing another.",
    pageNote: "Each cell is {cell} × {cell} entries; the strongest 16 keys of every query are exact.", wholeNote: "Every entry is here.",
    cellIs: "mean of this cell", made: "Made with Regard from {name}.",
    noSources: "Nothing is open yet.", start: "Type a text above and press Look, drop a file anywhere, or begin with the lessons.",
    sampleDoes: "from {percent} % of its rows", learn: "Attention step by step", wordOf: "what it does", lengths: "{q} queries, {k} keys", lessons: "Lessons",
    k_arrows: "move to the next cell (with Shift: a tenth of the view)", k_zoom: "zoom in, out, and to all", k_single: "zoom to a single entry", k_lock: "lock the pair, release it",
    k_heads: "previous, next head", k_layers: "previous, next layer", k_show: "weights, logits, percent", k_scale: "next scale", k_colours: "next colours",
    k_pooling: "mean or largest", k_first: "hide the first key", k_turn: "transpose", k_grid: "grid view", k_compare: "compare two maps",
    k_text: "write a text", k_language: "中文", k_theme: "light or dark", k_help: "this list",
  },
  zh: {
    title: "Regard：看得见的注意力",
    source: "看什么", model: "模型", text: "文字", look: "看", open: "打开文件",
    drop: "把轨迹文件，或含 q 和 k 的文件（.npz、.safetensors）拖到页面任何地方。",
    textHint: "输入一段文字，按“看”。", digitHint: "输入一个数字 0 到 9：模型看它的图像。", digitHelp: "一个手写数字", recording: "模型正在读……", opening: "正在打开 {name}……",
    overview: "所有的头", overviewNote: "点一个放大", sample: "抽样", exact: "精确", progress: "已算 {percent} % 的行",
    sampleNote: "目前是抽样：{percent} % 的行", exactNote: "精确",
    layer: "层", head: "头", query: "查询", key: "键", queries: "查询", keys: "键",
    encoder: "编码器", decoder: "解码器", self: "自注意力", cross: "交叉注意力",
    what: "显示", weights: "权重", logits: "logit", percent: "百分比",
    scale: "刻度", linear: "线性", log: "对数", row: "每行各自",
    colours: "颜色", viridis: "viridis", cividis: "cividis", grey: "灰度",
    pooling: "格子", mean: "平均", max: "最大",
    hideFirst: "隐藏第一个键", turn: "转置", fit: "全图", zoomIn: "放大", zoomOut: "缩小",
    gridView: "网格", mapView: "地图", compare: "比较", stopCompare: "只看一张", compareWith: "与之比较",
    pair: "这一对", nothing: "指向地图，或用方向键移动。", locked: "已锁定",
    weightIs: "权重", logitIs: "logit", ofRow: "在这一行排第 {rank}", hiddenPair: "这个查询不能看这个键：权重为 0。",
    readout: "查询 {i}“{q}”给键 {j}“{k}”的权重是 {weight}。", cellReadout: "查询 {i0} 到 {i1}，键 {j0} 到 {j1}：平均 {mean}，最大 {max}。",
    explain: "logit 从哪里来", lse: "这一行的 log-sum-exp", softmax: "权重 = exp(logit − lse)", share: "在输出中的份额",
    content: "内容", topKeys: "这个查询最看重的键", topQueries: "谁最看这个键", entropyIs: "熵 {entropy} 奈特",
    profiles: "分布", profile: "按位移的质量（查询 − 键）", entropy: "每个查询的熵", received: "每个键收到的质量",
    shares: "份额", previous: "前一个词元", first: "第一个键", induction: "归纳", toeplitz: "Toeplitz", selfShare: "自己",
    does_previous_token: "前一个词元", does_self: "自己", does_first_key: "第一个键", does_induction: "归纳", does_sink: "汇",
    does_wide: "很散", does_by_distance: "按距离", does_sharp: "很集中", does_mixed: "混合",
    tokens: "文字，按所看的那一行着色",
    gridNote: "查询格橙色，键格绿色，位移红色。", flat: "平面", perspective: "透视", delta: "位移",
    massAt: "δ 上的质量", noPlace: "其中一个在网格上没有位置。", picture: "格子里显示什么",
    picture_both: "图像和权重", picture_weights: "权重", picture_image: "图像",
    deltaTable: "按位移的质量（行、列）",
    language: "English", theme: "浅色或深色", help: "按键", close: "关闭", failed: "没有成功：{error}", gone: "那个已经不在了，换一个显示。",
    pageNote: "每格是 {cell} × {cell} 个元素；每个查询最看重的 16 个键是精确的。", wholeNote: "每个元素都在这里。",
    cellIs: "这一格的平均", made: "由 Regard 从 {name} 生成。",
    noSources: "还没有打开任何东西。", start: "在上面输入文字并按“看”，把文件拖到页面任何地方，或者先看课程。",
    sampleDoes: "根据 {percent} % 的行", learn: "一步一步学注意力", wordOf: "它做什么", lengths: "{q} 个查询，{k} 个键", lessons: "课程",
    k_arrows: "移到下一格（按住 Shift：视野的十分之一）", k_zoom: "放大、缩小、全图", k_single: "放大到单个元素", k_lock: "锁定这一对，放开",
    k_heads: "上一个、下一个头", k_layers: "上一层、下一层", k_show: "权重、logit、百分比", k_scale: "下一种刻度", k_colours: "下一种颜色",
    k_pooling: "平均或最大", k_first: "隐藏第一个键", k_turn: "转置", k_grid: "网格视图", k_compare: "比较两张图",
    k_text: "写一段文字", k_language: "English", k_theme: "浅色或深色", k_help: "这张表",
  },
};

let language = "en";
export const LANGUAGES = Object.keys(WORDS);

export function speak(name) {
  language = WORDS[name] ? name : "en";
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
}

export const spoken = () => language;

/** A sentence with its numbers. */
export function say(key, numbers = {}) {
  const text = WORDS[language][key] ?? key;
  return text.replace(/\{(\w+)\}/g, (_, name) => String(numbers[name] ?? ""));
}
