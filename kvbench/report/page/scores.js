// Choosing, charts, maps and the table: everything about scores.

function drawChoices() {
  const { panels, answers } = data.choices;
  const found = answers.find((answer) => String(answer.within) === byId("within").value).found;
  const batch = Math.max(1, Math.floor(+byId("batch").value) || 1);
  const context = Math.max(1, Math.floor(+byId("context").value) || 1);
  const factsOf = new Map(panels.map((panel) => [place(panel), panel]));
  const memory = (row) => {
    const one = context * factsOf.get(place(row)).token_bytes;
    if (!one || row.kind !== "found") return null;
    return { full: batch * one, held: batch * (row.of_context ? row.share * one : Math.min(one, row.kv_bytes_live)) };
  };
  const verdict = (row) => {
    if (row.kind === "found") return row.sure ? ["good", "certain"] : ["", "cannot tell"];
    if (row.kind === "none") return row.open ? ["", "cannot tell"] : ["bad", "none within"];
    return ["", "no statement"];
  };
  const card = (row) => {
    const [kind, text] = verdict(row);
    const told = memory(row);
    const where = [row.task || `${row.group}: ${meanTitle(row)}`, placeTitle(row)].filter(Boolean).join(" · ");
    return element("div", { class: "choice" },
      element("div", { class: "where" }, element("span", {}, where), element("span", { class: `badge ${kind}` }, text)),
      row.kind === "found" ? element("strong", {}, `${row.policy} at ${row.budget}`) : null,
      told ? element("div", { class: "saved" }, element("b", {}, `${bytes(told.full - told.held)} saved`), ` holds ${bytes(told.held)} of ${bytes(told.full)}`) : null,
      element("p", {}, row.said));
  };
  const rows = found.filter((row) => !row.task || !found.some((other) => !other.task && place(other) === place(row)));
  const rest = found.filter((row) => !rows.includes(row));
  const parts = [element("div", { class: "choices" }, ...rows.map(card))];
  if (rest.length) parts.push(element("details", {}, element("summary", {}, `Task by task (${rest.length})`), element("div", { class: "choices" }, ...rest.map(card))));
  if (!found.length) parts.splice(0, 1, element("p", {}, "No statement, because the full cache is not above chance."));
  const open = byId("choices").querySelector("details[open]");
  fill("choices", ...parts);
  if (open && rest.length) byId("choices").querySelector("details").open = true;
  byId("memory-note").textContent = memoryNote(panels, context);
}

function memoryNote(panels, context) {
  const known = panels.filter((panel) => panel.token_bytes);
  if (!known.length) return "Memory is unknown: the run has no full cache of a context.";
  const each = distinct(known.map((panel) => `${bytes(panel.token_bytes)} per token${varies.model ? ` (${panel.model})` : ""}`));
  const longest = Math.max(...panels.map((panel) => panel.length || panel.measured || 0));
  const beyond = context > longest ? ` The scores are for at most ${Math.round(longest)} tokens: this run does not show what a policy loses at ${context}.` : "";
  return `Memory counts keys and values over all compressed layers: ${each.join(", ")}, as measured in this run.${beyond} `
    + "The cheapest setting is selected after seeing the scores, so it is optimistically biased: confirm it on new samples.";
}

// --- figures --------------------------------------------------------------------------------------

// The colours in words, for print, where the buttons that show them are left out.
function legend(policies) {
  const named = policies.filter((policy) => palette.has(policy)).map((policy) => element("span", {}, swatch(policy), policyTitle(policy)));
  return policies.some((policy) => policy !== "full" && !palette.has(policy)) ? [...named, element("span", {}, "grey: the others")] : named;
}

function drawCharts() {
  const holder = byId("charts");
  byId("charts-title").textContent = `Score against ${MEMORY[state.memory].label}`;
  const found = views();
  holder.classList.toggle("single", found.length === 1);
  holder.replaceChildren(...found.map((rows) => {
    const task = rows[0].task === MEAN ? `${rows[0].group}: ${meanTitle(rows[0])}` : rows[0].task;
    const where = [placeTitle(rows[0]), rows.some((row) => row.telling) ? "" : "the full cache is not above chance"];
    const title = [`${task} `, element("small", {}, where.filter(Boolean).join(" · "))];
    return figure(title, 290, (width) => paretoChart(rows, width));
  }));
  fill("legend", ...legend(distinct(found.flatMap((rows) => rows.map((row) => row.policy)))));
  if (!found.length) holder.append(element("p", {}, "No cell matches these filters."));
}

// Where a mean is chosen, the mean over the tasks that record a depth, so that there is one map.
function meanOverTasks(rows) {
  const field = (row) => JSON.stringify(["model", "length", "moment", "policy", "budget", "depth"].map((name) => row[name]));
  const count = distinct(rows.map((row) => row.task)).length;
  if (count < 2 || distinct(rows.map((row) => row.unit)).length > 1) return rows;
  return [...d3.group(rows, field).values()].filter((mine) => mine.length === count).map((mine) => ({
    ...mine[0], task: `mean of ${count} tasks with a needle`, score: d3.mean(mine, (row) => row.score), count: d3.sum(mine, (row) => row.count),
  }));
}

function drawMaps() {
  const holder = byId("maps");
  const task = state.task === ALL ? null : JSON.parse(state.task)[1];
  const chosen = data.depths.filter((row) => (!task || row.task === task) && shown(row)
    && ["model", "length"].every((name) => state[name] === ALL || String(row[name]) === state[name])
    && (row.policy === "full" || state.moment === ALL || row.moment === state.moment));
  const here = task === MEAN ? meanOverTasks(chosen) : chosen;
  const parts = [];
  for (const rows of d3.group(here, (row) => JSON.stringify([row.model, row.task])).values()) {
    const lengths = distinct(rows.map((row) => row.length)).sort(d3.ascending);
    const depths = distinct(rows.map((row) => row.depth)).sort(d3.ascending);
    const across = lengths.length > 1 ? "length" : "budget";
    const domain = rows[0].unit ? [0, 100] : d3.extent(rows, (row) => row.score);
    const bands = across === "length" ? lengths : budgets.filter((budget) => state.budgets.has(budget));
    const counts = d3.extent(rows, (row) => row.count);
    const title = [rows[0].task, varies.model ? rows[0].model : "", across === "budget" ? tokens(lengths[0]) : ""].filter(Boolean).join(", ");
    parts.push(element("h3", {}, `${title}: mean score by depth, ${distinct(counts).join(" to ")} answers per field`));
    const keys = (row) => (across === "length" ? [row.policy, row.budget, row.moment] : [row.policy, row.moment]);
    for (const mine of d3.group(rows, (row) => JSON.stringify(keys(row))).values()) {
      const first = mine[0];
      const whole = first.policy === "full";
      const name = [whole ? "full" : policyTitle(first.policy), across === "length" && !whole ? first.budget : "", varies.moment ? first.moment : ""];
      const columns = whole && across === "budget" ? ["full"] : bands;
      parts.push(figure([name.filter(Boolean).join(", ")], mapHeight(depths), (width) => heatMap(mine, across, columns, depths, domain, width)));
    }
  }
  const section = byId("needles");
  section.hidden = byId("to-needles").hidden = !data.depths.length;
  holder.replaceChildren(...parts);
  if (!parts.length) holder.append(element("p", { class: "note" }, "The chosen task records no depth of its needle."));
}

// --- table ----------------------------------------------------------------------------------------

const MOST_ROWS = 1500;
const CSV_COLUMNS = ["model", "group", "task", "length", "moment", "seed", "policy", "budget", "metric", "samples", "score", "score_lo", "score_hi",
  "diff", "diff_lo", "diff_hi", "share", "kv_bytes_live", "kv_bytes_read", "kv_bytes_full", "prefill_s", "compress_s", "decode_s", "error", "cell"];
let tableRows = []; // as the table shows them, however many

function drawTable() {
  // Full is in the chart of every moment, and once in the table.
  const whole = (row) => JSON.stringify([row.model, row.group, row.task, row.length, row.seed, row.share, row.score]);
  const found = views();
  const seen = new Set();
  const rows = found.flat().filter((row) => shown(row) && (row.policy !== "full" || (!seen.has(whole(row)) && seen.add(whole(row)))));
  const mixed = distinct(found.map(([row]) => `${row.group} ${row.task}`)).length > 1;
  const by = (name) => (row) => row[name];
  const side = (row) => {
    const sign = row.higher ? 1 : -1;
    if (row.policy === "full" || row.diff_lo === null || row.diff_lo === undefined) return "";
    return Math.min(sign * row.diff_lo, sign * row.diff_hi) > 0 ? "good" : Math.max(sign * row.diff_lo, sign * row.diff_hi) < 0 ? "bad" : "";
  };
  const number = (title, name, write) => ({ title, value: by(name), cell: (row) => write(row[name]) });
  const columns = [
    { title: "task", text: true, value: by("task"), cell: (row) => row.task || `${row.group}: ${meanTitle(row)}` },
    ...varying.map((name) => ({ title: name, text: true, value: by(name), cell: (row) => (row.policy === "full" && name === "moment" ? DASH : nameOf(name, row[name])) })),
    { title: "policy", text: true, value: by("policy"), cell: (row) => policyTitle(row.policy) },
    { title: "budget", value: (row) => (row.budget === "full" ? Infinity : +row.budget), cell: by("budget") },
    number("KV held", "share", percent),
    number("bytes held", "kv_bytes_live", bytes),
    ...(readsFew ? [number("KV read", "read_share", percent)] : []),
    ...(holdsCodes ? [number("KV allocated", "allocated_share", percent)] : []),
    { title: "score", value: by("score"), kind: (row) => (row.error ? "bad" : ""), cell: (row) => (row.error ? element("span", { title: row.error }, "failed") : score(row.score, row.unit)) },
    { title: "95% interval", value: by("score_lo"), cell: (row) => interval(row.score_lo, row.score_hi, row.unit) },
    { title: "to full", value: by("diff"), kind: side, cell: (row) => (row.policy === "full" ? DASH : score(row.diff, row.unit, true)) },
    { title: "95% interval", value: by("diff_lo"), kind: side, cell: (row) => (row.policy === "full" ? DASH : interval(row.diff_lo, row.diff_hi, row.unit, true)) },
    number("samples", "samples", String),
    { ...number("compress, s", "compress_s", seconds), screen: true },
    { ...number("decode, s", "decode_s", seconds), screen: true },
    { title: "cell", text: true, screen: true, value: by("cell"), cell: (row) => element("code", { class: "soft" }, row.cell || DASH) },
  ].slice(mixed ? 0 : 1);
  const { mixed: before = mixed, column: sorted } = state.sort;
  if (before !== mixed || sorted >= columns.length) state.sort = { column: 0 }; // the columns are others
  const sort = state.sort;
  sort.mixed = mixed;
  tableRows = sort.touched ? sortRows(rows, columns[sort.column].value, sort.down) : rows;
  const onsort = (column) => {
    state.sort = { column, mixed, down: sort.touched && sort.column === column ? !sort.down : false, touched: true };
    drawTable();
    writeAddress();
  };
  fill("cells", table(columns, tableRows.slice(0, MOST_ROWS), { sorted: sort.touched ? sort : null, onsort, rowClass: (row) => (row.policy === "full" ? "full" : null) }));
  if (tableRows.length > MOST_ROWS) byId("cells").append(element("p", { class: "note" }, `${tableRows.length - MOST_ROWS} more rows: narrow the filters, or download the CSV.`));
}
