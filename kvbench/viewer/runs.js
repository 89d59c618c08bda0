// The list of runs: search, filters, order and links.

const data = JSON.parse(byId("data").textContent);
const FILTERS = { model: "models", policy: "policies", task: "tasks", status: "state" };
const MOST_NAMES = 6;
const CSV_COLUMNS = ["path", "date", "state", "models", "policies", "tasks", "ok", "failed", "problem"];
const FIELDS = ["search", "since", ...Object.keys(FILTERS).map((name) => `select-${name}`)];
const sort = { column: -1, down: false };
let shownRuns = [];

const valuesOf = (run, name) => [run[FILTERS[name]]].flat();
const textOf = (run) => [run.path, run.date, run.state, run.problem, ...run.models, ...run.policies, ...run.tasks].join("\n").toLowerCase();

function matches(run) {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.every((word) => textOf(run).includes(word))) return false;
  if (run.date.slice(0, 10) < byId("since").value) return false;
  return Object.keys(FILTERS).every((name) => {
    const chosen = byId(`select-${name}`).value;
    return !chosen || valuesOf(run, name).includes(chosen);
  });
}

// The first names, and the others behind a click.
function nameList(names) {
  if (names.length <= MOST_NAMES + 1) return names.join(", ");
  const rest = element("details", {}, element("summary", {}, `${names.length - MOST_NAMES} more`), names.slice(MOST_NAMES).join(", "));
  return element("div", {}, names.slice(0, MOST_NAMES).join(", "), rest);
}

function nameCell(run) {
  const name = run.link === null ? element("span", {}, run.path) : element("a", { href: run.link }, run.path);
  return element("div", { class: "run-name" }, name, run.problem ? element("small", { class: "bad" }, run.problem) : null);
}

const STATE_KINDS = { finished: "good", broken: "bad" };
const COLUMNS = [
  { title: "run", text: true, value: (run) => run.path, cell: nameCell },
  { title: "status", text: true, value: (run) => run.state, cell: (run) => element("span", { class: `badge ${STATE_KINDS[run.state] || ""}` }, run.state) },
  { title: "changed", text: true, value: (run) => run.date, cell: (run) => run.date },
  { title: "cells", value: (run) => run.ok, cell: (run) => `${run.ok}${run.failed ? ` (${run.failed} failed)` : ""}` },
  { title: "models", text: true, value: (run) => run.models.join(), cell: (run) => nameList(run.models) },
  { title: "policies", text: true, value: (run) => run.policies.join(), cell: (run) => nameList(run.policies) },
  { title: "tasks", text: true, value: (run) => run.tasks.join(), cell: (run) => nameList(run.tasks) },
];

function draw() {
  const runs = data.runs.filter(matches);
  shownRuns = sort.column < 0 ? runs : sortRows(runs, COLUMNS[sort.column].value, sort.down);
  const onsort = (index) => {
    Object.assign(sort, { column: index, down: sort.column === index && !sort.down });
    draw();
  };
  fill("runs", table(COLUMNS, shownRuns, { sorted: sort.column < 0 ? null : sort, onsort }));
  byId("count").textContent = `${shownRuns.length} of ${data.runs.length}`;
  if (!shownRuns.length) byId("runs").append(element("p", { class: "note" }, "No run matches."));
  writeAddress();
}

function writeAddress() {
  const chosen = new URLSearchParams(FIELDS.filter((id) => byId(id).value).map((id) => [id, byId(id).value]));
  const text = String(chosen);
  if (text !== location.hash.slice(1)) history.replaceState(null, "", text ? `#${text}` : location.href.split("#")[0]);
}

function controls() {
  fill("selects", ...Object.keys(FILTERS).map((name) => {
    const values = distinct(data.runs.flatMap((run) => valuesOf(run, name))).sort();
    const options = [element("option", { value: "" }, "all"), ...values.map((value) => element("option", { value }, value))];
    return element("label", {}, name, element("select", { id: `select-${name}` }, ...options));
  }));
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const id of FIELDS) {
    const box = byId(id);
    if (asked.has(id)) box.value = asked.get(id);
    if (box.selectedIndex === -1) box.selectedIndex = 0;
    box.addEventListener("input", draw);
  }
  for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => location.reload());
  const joined = (run) => Object.fromEntries(CSV_COLUMNS.map((name) => [name, [run[name]].flat().join(", ")]));
  byId("download").addEventListener("click", () => download("runs.csv", csvText(CSV_COLUMNS, shownRuns.map(joined))));
}

byId("root").textContent = `runs in ${data.root}`;
byId("without").textContent = data.without.length ? `Without a run: ${data.without.join(", ")}.` : "";
controls();
draw();
theme();
document.documentElement.dataset.ready = "true";
