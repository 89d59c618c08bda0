// Elements and numbers. Text reaches the page only through `element`, which makes text nodes of it.

const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const fill = (id, ...children) => byId(id).replaceChildren(...children);

const distinct = (values) => [...new Set(values)];

// --- the window -----------------------------------------------------------------------------------

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });
}

// Jumps to a section end below the filters, which stay in sight on a wide window.
function clearFilters() {
  const bar = byId("filters");
  const height = getComputedStyle(bar).position === "sticky" ? bar.offsetHeight + 12 : 12;
  document.documentElement.style.scrollPaddingTop = `${height}px`;
}

// --- numbers, as `kvbench.tables.numbers` writes them ---------------------------------------------

const DASH = "–";

// Ties go away from zero, also where the last bits of a mean put it just below one.
const fixed = (value, digits) => (value * (1 + 1e-12)).toFixed(digits);

function signed(text, sign) {
  if (!/[1-9∞]/.test(text)) return text.replace("-", "");
  return text.startsWith("-") ? `−${text.slice(1)}` : (sign ? "+" : "") + text;
}

function score(value, unit, sign = false) {
  if (value === null || value === undefined) return DASH;
  return signed(unit ? fixed(100 * value, 1) : String(+value.toPrecision(4)), sign);
}

function interval(low, high, unit, sign = false) {
  if (low === null || high === null || low === undefined) return DASH;
  return `[${score(low, unit, sign)}, ${score(high, unit, sign)}]`;
}

function percent(share) {
  if (share === null || share === undefined) return DASH;
  return `${fixed(100 * share, share >= 0.9995 ? 0 : 1)}%`;
}

function bytes(value) {
  if (value === null || value === undefined) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  while (value >= 999.5 && units.length > 1) {
    value /= 1024;
    units.shift();
  }
  return `${value.toFixed(units[0] === "B" || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2)} ${units[0]}`;
}

const seconds = (value) => (value === null || value === undefined ? DASH : String(+value.toPrecision(3)));

const tokens = (length) => (length ? `${length} tokens` : "natural length");

// --- files ----------------------------------------------------------------------------------------

// As `kvbench.tables.outputs.csv`: text that a spreadsheet would evaluate gets a leading apostrophe.
function csvCell(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "string" ? value.replace(/^[=+\-@]/, "'$&") : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const csvText = (names, rows) => [names, ...rows.map((row) => names.map((name) => row[name]))]
  .map((cells) => `${cells.map(csvCell).join(",")}\n`).join("");

function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// --- figures --------------------------------------------------------------------------------------

const waiting = new Map();
const watcher = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) drawNow(target);
}, { rootMargin: "400px" });

function drawNow(figure) {
  watcher.unobserve(figure);
  const draw = waiting.get(figure);
  waiting.delete(figure);
  if (draw && figure.isConnected) figure.append(draw(Math.max(240, Math.floor(figure.clientWidth))));
}

// A figure that is drawn when it comes near the window: a run can have hundreds. `height` is about
// what it will take, in pixels.
function figure(title, height, draw) {
  const made = element("figure", { style: `min-height: ${height}px` }, element("figcaption", {}, ...title));
  waiting.set(made, draw);
  watcher.observe(made);
  return made;
}

addEventListener("beforeprint", () => [...waiting.keys()].forEach(drawNow));

// Rows by a value, stable; rows without one come last.
function sortRows(rows, value, down) {
  const missing = (v) => v === null || v === undefined;
  const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  return [...rows].sort((a, b) => missing(value(a)) - missing(value(b)) || (down ? -1 : 1) * order(value(a), value(b)));
}

// --- tables ---------------------------------------------------------------------------------------

const classesOf = (column) => [column.text ? "text" : "", column.screen ? "screen" : ""].join(" ").trim();

// columns: {title, text, screen (not in print), cell(row) -> string or node, value(row), kind(row) -> class}; with
// `sorted` ({column, down}) and `onsort` the titles sort.
function table(columns, rows, { sorted = null, onsort = null, rowClass = () => null } = {}) {
  const heads = columns.map((column, index) => {
    const mine = sorted && sorted.column === index;
    const title = onsort
      ? element("button", { type: "button", onclick: () => onsort(index) }, column.title)
      : column.title;
    const order = mine ? (sorted.down ? "descending" : "ascending") : null;
    return element("th", { class: classesOf(column) || null, scope: "col", "aria-sort": order }, title);
  });
  const lines = rows.map((row) =>
    element("tr", { class: rowClass(row) }, ...columns.map((column) => {
      const classes = `${classesOf(column)} ${column.kind ? column.kind(row) : ""}`.trim();
      return element("td", { class: classes || null, "data-title": column.title }, column.cell(row));
    })));
  return element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...lines));
}
