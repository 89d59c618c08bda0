// Draws the leaderboard, and draws again what a control changes.

const MOST_ENTRIES = 1500;
const BAD_MARKS = new Set(["failed", "disagrees"]);
const DOWNLOADED = ["model", "group", "task", "length", "moment", "seed", "questions", "policy", "budget", "metric", "samples", "score", "score_lo", "score_hi",
  "diff", "diff_lo", "diff_hi", "share", "kv_bytes_live", "kv_bytes_read", "kv_bytes_full", "held_front", "read_front", "marks", "cell", "digest", "command"];
let shownEntries = []; // as the table shows them, however many

const pairs = (list) => list.map(([name, ...values]) => element("div", {}, element("dt", {}, name), element("dd", {}, ...values)));
const command = (text) => element("pre", { class: "command" }, text);
const runOf = (row) => data.publications[row.publication];
const badge = (mark) => element("span", { class: `badge ${BAD_MARKS.has(mark) ? "bad" : ""}`, title: data.marks[mark] }, mark);
const taskTitle = (row) => row.task || `${row.group}: ${meanTitle(row)}`;

function drawHead() {
  fill("facts", ...pairs(data.facts));
  fill("marks", ...pairs(Object.entries(data.marks).map(([mark, meaning]) => [badge(mark), meaning])));
}

// --- entries --------------------------------------------------------------------------------------

// A full cache is in the chart of every moment, and once in the table.
function chosenEntries() {
  const seen = new Set();
  return data.rows.filter((row) => {
    if (!matches(row) || !shown(row)) return false;
    if (row.policy !== "full") return true;
    const key = JSON.stringify([row.publication, row.model, row.group, row.task, row.length, row.seed, row.cell, row.score]);
    return !seen.has(key) && seen.add(key);
  });
}

function sideOfZero(row) {
  if (row.policy === "full" || row.diff_lo === null || row.diff_lo === undefined) return "";
  const [low, high] = row.higher ? [row.diff_lo, row.diff_hi] : [-row.diff_hi, -row.diff_lo];
  if (low > 0) return "good";
  return high < 0 ? "bad" : "";
}

function entryColumns(rows) {
  const by = (name) => (row) => row[name];
  const ofFull = (write) => (row) => (row.policy === "full" ? DASH : write(row));
  const isMixed = distinct(rows.map((row) => `${row.group} ${row.task}`)).length > 1;
  const text = (title, name, cell = by(name)) => ({ title, text: true, value: by(name), cell });
  const isFront = (row) => Boolean(row[`${state.memory}_front`]);
  return [
    text("policy", "policy", (row) => element("span", { class: "policy" }, row.policy === "full" ? null : swatch(row.policy), policyTitle(row.policy))),
    { title: "budget", value: (row) => (row.budget === "full" ? Infinity : +row.budget), cell: by("budget") },
    { title: "score", value: by("score"), kind: (row) => (row.error ? "bad" : ""), cell: (row) => (row.error ? "failed" : score(row.score, row.unit)) },
    { title: "95% interval", value: by("score_lo"), cell: (row) => interval(row.score_lo, row.score_hi, row.unit) },
    { title: "to full", value: by("diff"), kind: sideOfZero, cell: ofFull((row) => score(row.diff, row.unit, true)) },
    { title: "95% interval", value: by("diff_lo"), kind: sideOfZero, cell: ofFull((row) => interval(row.diff_lo, row.diff_hi, row.unit, true)) },
    { title: "KV held", value: by("share"), cell: (row) => percent(row.share) },
    ...(readsFew ? [{ title: "KV read", value: by("read_share"), cell: (row) => percent(row.read_share) }] : []),
    { title: "front", value: isFront, kind: () => "front", cell: (row) => (isFront(row) ? "★" : "") },
    { title: "published run", text: true, value: (row) => runOf(row).short, cell: (row) => element("button", { type: "button", class: "digest", title: "Versions, and the command that repeats it", onclick: () => showEntry(row) }, element("code", {}, runOf(row).short)) },
    { title: "marks", text: true, value: (row) => row.marks.join(), cell: (row) => element("span", {}, ...row.marks.map(badge)) },
    ...varying.map((name) => text(name, name, (row) => (name === "moment" && row.policy === "full" && row.moment !== "turns" ? DASH : nameOf(name, row[name])))),
    ...(isMixed ? [text("task", "task", taskTitle)] : []),
  ];
}

function drawEntries() {
  let rows = chosenEntries();
  const columns = entryColumns(rows);
  const titles = JSON.stringify(columns.map((column) => column.title));
  if (state.sort.titles !== titles) state.sort = { titles, column: -1 }; // the columns are others
  const { column, down } = state.sort;
  if (column >= 0) rows = sortRows(rows, columns[column].value, down);
  shownEntries = rows;
  const onsort = (index) => {
    state.sort = { titles, column: index, down: column === index && !down };
    drawEntries();
  };
  const sorted = column >= 0 ? state.sort : null;
  fill("cells", table(columns, rows.slice(0, MOST_ENTRIES), { sorted, onsort, rowClass: (row) => (row.policy === "full" ? "full" : null) }));
  if (rows.length > MOST_ENTRIES) byId("cells").append(element("p", { class: "note" }, `${rows.length - MOST_ENTRIES} more entries: narrow the filters.`));
  if (!rows.length) byId("cells").append(element("p", { class: "note" }, "No entry matches these filters."));
}

function showEntry(row) {
  const run = runOf(row);
  const where = [taskTitle(row), row.model, nameOf("moment", row.policy === "full" ? "" : row.moment), tokens(row.length), row.questions];
  const facts = [
    ["Score", `${score(row.score, row.unit)} ${interval(row.score_lo, row.score_hi, row.unit)}`],
    ["To full", `${score(row.diff, row.unit, true)} ${interval(row.diff_lo, row.diff_hi, row.unit, true)}`],
    ["KV held", `${percent(row.share)}, ${bytes(row.kv_bytes_live)}`],
    ["Metric", row.metric],
    ["Hardware", run.hardware],
    ["Digest of the published run", element("code", {}, run.digest)],
  ];
  if (row.cell) facts.push(["Hash of the cell", element("code", {}, row.cell)]);
  const versions = row.versions.map((index) => data.versions[index]);
  const names = distinct(versions.flatMap((version) => Object.keys(version)));
  const versionRows = names.map((name) => ({ name, value: distinct(versions.map((version) => version[name] || DASH)).join(", ") }));
  fill("detail",
    element("h3", {}, `${policyTitle(row.policy)} at ${row.budget}`), element("p", { class: "note" }, where.join(" · ")), element("dl", {}, ...pairs(facts)),
    element("h3", {}, "Repeat it"), command(row.command),
    ...disagreements(row), ...remarksOf(run),
    element("h3", {}, "Versions"), element("div", { class: "scroll" }, table(["name", "value"].map((name) => ({ title: name, text: true, cell: (line) => element("code", {}, line[name]) })), versionRows)));
  byId("entry").hidden = false;
  byId("entry").scrollIntoView({ behavior: "instant" });
}

const remarksOf = (run) => (run.remarks.length ? [element("h3", {}, "Remarks on the run"), ...run.remarks.map((text) => element("p", { class: "remark" }, text))] : []);

function disagreements(row) {
  if (!row.disagreements.length) return [];
  const other = (found) => data.publications[found.other].short;
  const differing = (found) => found.settings.map(([name, here, there]) => `${name}: ${here} here, ${there} there`).join("; ");
  const columns = [
    { title: "task", text: true, cell: (found) => found.task },
    { title: "other run", text: true, cell: (found) => element("code", {}, other(found)) },
    { title: "this minus other", text: true, cell: (found) => `${score(found.difference, row.unit, true)} ${interval(found.lo, found.hi, row.unit, true)}` },
    { title: "compared by", text: true, cell: (found) => (found.paired ? "the questions of both" : "their intervals") },
    { title: "made differently", text: true, cell: (found) => differing(found) || "no setting on record differs" },
  ];
  return [element("h3", {}, "Disagrees with"), element("div", { class: "scroll" }, table(columns, row.disagreements))];
}

// --- published runs -------------------------------------------------------------------------------

function drawPublications() {
  fill("publications", ...data.publications.map((run) => element("div", { class: "run" },
    element("h3", {}, element("code", {}, run.digest)),
    element("dl", {}, ...pairs([
      ["Model", run.models.join(", ")], ["Tasks", run.tasks.join(", ")], ["Policies", String(run.policies)], ["Cells", String(run.cells)],
      ["Hardware", run.hardware], ["Published with", `kvbench ${run.kvbench}`],
    ])),
    ...remarksOf(run),
    element("details", {}, element("summary", {}, "Command"), command(run.command)))));
}

// --- controls -------------------------------------------------------------------------------------

const names = data.policies.map((policy) => policy.name);
let showControls = () => {};

function draw() {
  const bright = new Set(views().flatMap((rows) => [...coloured(rows)]));
  setPalette(names.filter((name) => bright.has(name)));
  showControls();
  drawEntries();
  drawCharts();
  byId("shown").textContent = filterText();
}

function choosePolicies() {
  const text = byId("containing").value.toLowerCase();
  state.policies.clear();
  names.filter((name) => name.toLowerCase().includes(text)).forEach((name) => state.policies.add(name));
  draw();
}

function downloadEntries() {
  const rows = shownEntries.map((row) => ({ ...row, task: taskTitle(row), marks: row.marks.join("; "), digest: runOf(row).digest }));
  download("leaderboard.csv", csvText(DOWNLOADED, rows));
}

drawHead();
drawPublications();
showControls = controls(draw, lift);
draw();
theme();
clearFilters();
byId("containing").addEventListener("input", choosePolicies);
byId("download").addEventListener("click", downloadEntries);
byId("print").addEventListener("click", () => print());
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
document.documentElement.dataset.ready = "true";
