// Pareto fronts and heat maps, drawn by Observable Plot.

const COLOURS = 8;
const SYMBOLS = ["circle", "square", "triangle", "diamond", "star", "cross", "wye"];
const PERCENT_TICKS = [1, 2, 5, 10, 20, 30, 50, 70, 100];
const TOKEN_TICKS = d3.range(7).flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const LOG_FROM = 4.08; // budgets that span more get a logarithmic axis

const GREY = "var(--grey)";
const usualColour = (policy) => `var(--c${lookOf.get(policy) % COLOURS})`; // as in the PNG figures

// The colours of the policies that have one: each its own as long as there are enough. The others are grey.
const palette = new Map();
function setPalette(policies) {
  palette.clear();
  const free = new Set(d3.range(COLOURS).map((index) => `var(--c${index})`));
  for (const policy of policies) {
    const usual = usualColour(policy);
    const mine = free.has(usual) || !free.size ? usual : free.values().next().value;
    free.delete(mine);
    palette.set(policy, mine);
  }
}
const colour = (policy) => palette.get(policy) || GREY;
const symbol = (policy) => SYMBOLS[lookOf.get(policy) % SYMBOLS.length];

function swatch(policy) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of [["width", 12], ["height", 12], ["viewBox", "-6 -6 12 12"], ["aria-hidden", "true"]])
    made.setAttribute(name, value);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  const kinds = { circle: d3.symbolCircle, square: d3.symbolSquare, triangle: d3.symbolTriangle,
    diamond: d3.symbolDiamond, star: d3.symbolStar, wye: d3.symbolWye, cross: d3.symbolCross };
  path.setAttribute("d", d3.symbol(kinds[symbol(policy)], 62)());
  path.style.fill = colour(policy);
  made.append(path);
  return made;
}

// The points that no other beats: none is cheaper and as good, or better and as cheap. Policies that see the answer
// do not compete.
function front(points, memory) {
  const worth = (row) => (row.higher ? row.score : -row.score);
  const ordered = points.filter((row) => !row.informed).sort((a, b) => a[memory.bytes] - b[memory.bytes] || worth(b) - worth(a));
  const best = [];
  for (const row of ordered) if (!best.length || worth(row) > worth(best[best.length - 1])) best.push(row);
  return best;
}

const drawable = (rows) => rows.filter((row) => row.policy !== "full" && row.score !== null && inBudget(row) && row[MEMORY[state.memory].share] !== null);

// The policies that have a colour in a chart: the chosen ones and those on the front, or all if they are few.
function coloured(rows) {
  const points = drawable(rows);
  const best = front(points, MEMORY[state.memory]);
  const every = allPolicies() && distinct(points.map((row) => row.policy)).length <= COLOURS;
  const named = new Set(best.map((row) => row.policy));
  return new Set(points.map((row) => row.policy).filter((policy) => every || named.has(policy) || (!allPolicies() && state.policies.has(policy))));
}

function told(row) {
  const lines = [
    `${policyTitle(row.policy)} at ${row.budget}`,
    [row.task === MEAN ? meanTitle(row) : row.task, row.moment].filter(Boolean).join(", "),
    `score ${score(row.score, row.unit)} ${interval(row.score_lo, row.score_hi, row.unit)}`,
  ];
  if (row.diff !== null)
    lines.push(`to full ${score(row.diff, row.unit, true)} ${interval(row.diff_lo, row.diff_hi, row.unit, true)}`);
  lines.push(`KV held ${percent(row.share)}, ${bytes(row.kv_bytes_live)}`);
  if (row.held_tokens) lines.push(`${+row.held_tokens.toPrecision(4)} tokens per KV head`);
  if (holdsCodes) lines.push(`KV allocated ${percent(row.allocated_share)}`);
  if (readsFew) lines.push(`KV read ${percent(row.read_share)}, ${bytes(row.kv_bytes_read)}`);
  lines.push(`${row.samples} samples`);
  if (row.informed) lines.push("a reference that sees the answer");
  return lines.join("\n");
}

function paretoChart(rows, width) {
  const full = rows.find((row) => row.policy === "full" && row.score !== null);
  const points = drawable(rows);
  if (!points.some(shown)) return element("p", { class: "note" }, "Nothing to draw: no setting that is shown has a score.");
  const scale = rows[0].unit ? 100 : 1;
  const memory = MEMORY[state.memory];
  const share = (row) => row[memory.share] / memory.unit;
  const at = (name) => (row) => scale * row[name];
  const bright = coloured(rows);
  const best = front(points, memory);
  // Grey policies that are not chosen are the background of the others, which set the limits of the axes.
  const inView = points.filter((row) => shown(row) || bright.has(row.policy));
  const ends = [...(full ? [full] : []), ...inView].flatMap((row) => (shown(row) ? [row.score, row.score_lo, row.score_hi] : [row.score]))
    .filter((value) => value !== null).map((value) => scale * value);
  const [least, most] = d3.extent(inView, share);
  const log = least > 0 && most / least > LOG_FROM;
  const pad = log ? Math.max(1.06, (most / least) ** 0.06) : Math.max(0.06 * (most - least), 0.06 * most);
  const domain = log ? [least / pad, most * pad] : [least - pad, most + pad];
  const ticks = (memory.unit === 1 ? TOKEN_TICKS : PERCENT_TICKS).filter((tick) => tick >= domain[0] && tick <= domain[1]);
  const ofPolicy = d3.group(points, (row) => row.policy);
  const policies = [...ofPolicy.keys()].sort((a, b) => bright.has(a) - bright.has(b)); // grey below colours
  const paired = policies.filter((policy) => bright.has(policy) && state.policies.has(policy));
  const [low, high] = d3.extent(ends);
  const room = 0.04 * (high - low || 1);
  const marks = [Plot.ruleY([low - room], { stroke: "var(--soft)" })];
  if (full) {
    marks.push(Plot.rect([full], { y1: at("score_lo"), y2: at("score_hi"), fill: "var(--soft)", fillOpacity: 0.13 }));
    marks.push(Plot.ruleY([full], { y: at("score"), stroke: "var(--soft)", strokeDasharray: "5,3" }));
  }
  if (best.length) marks.push(Plot.line([...best, { ...best[best.length - 1], [memory.share]: domain[1] * memory.unit }],
    { x: share, y: at("score"), curve: "step-after", stroke: "currentColor", strokeDasharray: "1.5,3", clip: true }));
  for (const policy of policies) {
    const mine = [...ofPolicy.get(policy)].sort((a, b) => share(a) - share(b));
    const look = { stroke: bright.has(policy) ? colour(policy) : GREY, ariaDescription: policy, clip: true };
    marks.push(Plot.line(mine, { ...look, x: share, y: at("score"), strokeOpacity: 0.5 }));
    const aside = (paired.indexOf(policy) - (paired.length - 1) / 2) * Math.min(4, 24 / paired.length); // bars side by side
    if (paired.includes(policy))
      marks.push(Plot.ruleX(mine, { ...look, x: share, y1: at("score_lo"), y2: at("score_hi"), strokeOpacity: 0.55, dx: aside }));
  }
  for (const policy of policies) {
    const look = bright.has(policy) ? { r: 4.5, fill: colour(policy) } : { r: 3, fill: GREY };
    marks.push(Plot.dot(ofPolicy.get(policy), { ...look, x: share, y: at("score"), symbol: symbol(policy), stroke: "var(--panel)", strokeWidth: 0.8, ariaDescription: policy, clip: true }));
  }
  marks.push(Plot.tip(inView, Plot.pointer({
    x: share, y: at("score"), fill: "var(--panel)", stroke: "var(--soft)", fontSize: 12, lineHeight: 1.25,
    title: (row) => inView.filter((other) => share(other) === share(row) && other.score === row.score).slice(0, 4).map(told).join("\n\n"),
  })));
  return Plot.plot({
    width, height: Math.min(460, Math.max(260, 0.55 * width)), marginLeft: 46, marginRight: 16, marginBottom: 40,
    style: { background: "none", fontSize: "12px" },
    x: { type: log ? "log" : "linear", domain, ticks: ticks.length > 1 ? ticks : 4, tickFormat: (v) => String(v), label: `${memory.label}, ${memory.axis}${log ? ", log scale" : ""}`, labelAnchor: "center", labelArrow: "none" },
    y: { domain: [low - room, high + room], grid: true, ticks: 5, label: rows[0].higher ? "score" : "score, lower is better", labelArrow: "none" },
    marks,
  });
}

// Brings a policy to the front of every chart, in its colour, while the others fade; null: all as they were.
function lift(policy) {
  for (const chart of byId("charts").querySelectorAll("svg")) {
    chart.classList.toggle("lifting", policy !== null);
    for (const mark of chart.querySelectorAll("[aria-description]")) mark.classList.toggle("lifted", mark.getAttribute("aria-description") === policy);
  }
  if (policy !== null) byId("charts").style.setProperty("--lifted", palette.get(policy) || usualColour(policy));
}

// --- needles --------------------------------------------------------------------------------------

const mapHeight = (depths) => 54 + 24 * depths.length;

function heatMap(rows, across, lengths, depths, domain, width) {
  const scale = rows[0].unit ? 100 : 1;
  const value = (row) => scale * row.score;
  const bright = (row) => (value(row) - domain[0]) / (domain[1] - domain[0] || 1) > 0.55;
  return Plot.plot({
    width, height: mapHeight(depths), marginLeft: 38, marginBottom: 36, marginTop: 6, marginRight: 4,
    style: { background: "none", fontSize: "12px" },
    x: { type: "band", domain: lengths, label: across === "length" ? "context, tokens" : "budget", labelAnchor: "center", labelArrow: "none", tickSize: 0, padding: 0.04 },
    y: { type: "band", domain: depths, label: null, tickSize: 0, tickFormat: (depth) => `${depth}%`, padding: 0.04 },
    color: { type: "linear", scheme: "cividis", domain },
    marks: [
      Plot.cell(rows, { x: across, y: "depth", fill: value, rx: 2 }),
      Plot.text(rows, { x: across, y: "depth", text: (row) => value(row).toFixed(rows[0].unit ? 0 : 2), fill: (row) => (bright(row) ? "#111" : "#fff") }),
      Plot.tip(rows, Plot.pointer({ x: across, y: "depth", fill: "var(--panel)", stroke: "var(--soft)", title: (row) =>
        `${policyTitle(row.policy)} at ${row.budget}\n${tokens(row.length)}, depth ${row.depth}%\nscore ${score(row.score, row.unit)}, ${row.count} answers` })),
    ],
  });
}
