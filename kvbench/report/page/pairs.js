// Policy against policy: paired differences from one of them at the same budget.

const LEVEL = 0.05; // of the tests, as in `kvbench compare-policies`
const PAIR_COLUMNS = ["model", "group", "tasks", "length", "moment", "seed", "budget", "base", "policy", "base_score", "score", "diff", "diff_lo", "diff_hi", "p_corrected", "contexts", "decided"];
const pairSort = { column: -1, down: false };
let pairRows = []; // as the table shows them

// The mean of every setting, or its only task: what the tests are about.
const meanRows = new Map();
for (const row of [...data.rows].sort((a, b) => (a.task === MEAN) - (b.task === MEAN)))
  meanRows.set(JSON.stringify([place(row), row.policy, row.budget]), row);

function pairsAgainst(base) {
  const group = state.task === ALL ? null : JSON.parse(state.task)[0];
  return data.pairs.filter((panel) => matches(panel, { anyTask: true }) && (group === null || panel.group === group)).flatMap((panel, order) =>
    (panel.tests || []).filter((test) => test[1] === base || test[2] === base).map((test) => {
      const [budget, first, second, diff, low, high, p, pSecond, contexts] = test;
      const turned = second === base;
      const policy = turned ? first : second;
      const mean = (name) => meanRows.get(JSON.stringify([place(panel), name, budget]));
      const row = {
        ...mean(policy), ...panel, tests: null, order, base, policy, budget, contexts, base_score: mean(base).score,
        diff: turned ? -diff : diff, diff_lo: turned ? -high : low, diff_hi: turned ? -low : high, p_corrected: turned ? pSecond : p,
      };
      return { ...row, decided: row.p_corrected < LEVEL && (row.diff_lo > 0 || row.diff_hi < 0) };
    })).filter(shown);
}

const writeP = (p) => (p < 0.001 ? "< 0.001" : String(+p.toPrecision(2)));

function pairColumns(base, rows) {
  const by = (name) => (row) => row[name];
  const side = (row) => (row.decided ? ((row.diff > 0) === row.higher ? "good" : "bad") : "");
  const mixed = distinct(rows.map((row) => row.group)).length > 1;
  return [
    ...(mixed ? [{ title: "task", text: true, value: by("group"), cell: (row) => `${row.group}: ${meanTitle(row)}` }] : []),
    ...varying.map((name) => ({ title: name, text: true, value: by(name), cell: (row) => nameOf(name, row[name]) })),
    { title: "budget", value: (row) => +row.budget, cell: by("budget") },
    { title: "policy", text: true, value: by("policy"), cell: (row) => policyTitle(row.policy) },
    { title: "score", value: by("score"), cell: (row) => score(row.score, row.unit) },
    { title: `score of ${policyTitle(base)}`, value: by("base_score"), cell: (row) => score(row.base_score, row.unit) },
    { title: "difference", value: by("diff"), kind: side, cell: (row) => score(row.diff, row.unit, true) },
    { title: "95% interval", value: by("diff_lo"), kind: side, cell: (row) => interval(row.diff_lo, row.diff_hi, row.unit, true) },
    { title: "corrected p", value: by("p_corrected"), cell: (row) => writeP(row.p_corrected) },
    { title: "contexts", value: by("contexts"), cell: (row) => String(row.contexts) },
    { title: "result", text: true, value: (row) => String(row.decided), kind: side, cell: (row) => (row.decided ? "decided" : "undecided") },
  ];
}

function drawPairs() {
  byId("pairs").hidden = byId("to-pairs").hidden = !data.pairs.length;
  if (!data.pairs.length) return;
  const base = byId("against").value;
  const rows = pairsAgainst(base);
  const columns = pairColumns(base, rows);
  const worth = (row) => (row.higher ? row.diff : -row.diff);
  const { column, down } = pairSort;
  pairRows = column < 0 ? rows.sort((a, b) => a.order - b.order || +a.budget - +b.budget || worth(b) - worth(a)) : sortRows(rows, columns[Math.min(column, columns.length - 1)].value, down);
  const onsort = (index) => {
    Object.assign(pairSort, { column: index, down: column === index && !down });
    drawPairs();
  };
  fill("pair-table", table(columns, pairRows.slice(0, MOST_ROWS), { sorted: column < 0 ? null : pairSort, onsort }));
  const untested = data.pairs.filter((panel) => panel.tests === null).length;
  const notes = [
    ...(rows.length ? [] : ["Nothing to compare: no other policy that is shown has scores of the same tasks at the same budget."]),
    ...(rows.length > MOST_ROWS ? [`${rows.length - MOST_ROWS} more rows: narrow the filters, or download the CSV.`] : []),
    ...(untested ? [`${untested} of ${data.pairs.length} panels have too many pairs to test them here; kvbench compare-policies tests a pair of them.`] : []),
  ];
  byId("pair-table").append(...notes.map((text) => element("p", { class: "note" }, text)));
}

// Builds the choice of the base policy.
function comparing() {
  const names = data.policies.map((policy) => policy.name).filter((name) => data.pairs.some((panel) => (panel.tests || []).some((test) => test[1] === name || test[2] === name)));
  fill("against", ...names.map((name) => element("option", { value: name }, policyTitle(name))));
  byId("against").addEventListener("change", () => { drawPairs(); writeAddress(); });
  byId("download-pairs").addEventListener("click", () => download("policy-against-policy.csv", csvText(PAIR_COLUMNS, pairRows)));
}
