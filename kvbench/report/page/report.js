// Draws the page, and draws again what a control changes.

function drawHead() {
  byId("model").textContent = distinct(data.rows.map((row) => row.model)).join(", ");
  fill("facts", ...data.facts.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))));
  if (data.commands.length) fill("commands", element("p", { class: "soft" }, "Command"), ...data.commands.map((text) => element("pre", { tabindex: "0" }, text)));
  fill("remarks", ...data.remarks.map((text) => element("p", { class: "remark" }, text)));
}

function drawProvenance() {
  fill("made", ...Object.entries(data.provenance).flatMap(([title, rows]) => {
    const names = distinct(rows.flatMap((row) => Object.keys(row)));
    const columns = names.map((name) => ({ title: name, text: true, cell: (row) => element("code", {}, row[name] || DASH) }));
    return [element("h3", {}, title), element("div", { class: "scroll" }, table(columns, rows))];
  }));
  byId("made").append(element("p", { class: "note" }, "Of the hardware, this page names the kind of device. The table of settings names the hash of every cell, which covers all that can change a response."));
}

function choosing() {
  const { answers, within, batch, context } = data.choices;
  fill("within", ...answers.map((answer) => element("option", { value: answer.within }, `${answer.within} point${answer.within === 1 ? "" : "s"}`)));
  byId("within").value = String(answers.map((answer) => answer.within).find((points) => Math.abs(points - within) < 1e-6));
  byId("batch").value = batch;
  byId("context").value = context || 1;
  for (const id of ["within", "batch", "context"]) byId(id).addEventListener("input", () => { drawChoices(); writeAddress(); });
}

let showControls = () => {};

function draw() {
  const bright = new Set(views().flatMap((rows) => [...coloured(rows)]));
  setPalette(data.policies.map((policy) => policy.name).filter((name) => bright.has(name)));
  showControls();
  drawCharts();
  drawMaps();
  drawTable();
  drawPairs();
  drawSamples();
  byId("shown").textContent = filterText();
}

function buttons() {
  byId("print").addEventListener("click", () => print());
  byId("download").addEventListener("click", () => download("settings.csv", csvText(CSV_COLUMNS, tableRows.map((row) => ({ ...row, task: row.task || meanTitle(row) })))));
  // A link to a section must not replace the filters in the address.
  for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", (event) => {
    event.preventDefault();
    document.querySelector(link.getAttribute("href")).scrollIntoView();
  });
  addEventListener("hashchange", () => { if (location.hash.includes("=")) location.reload(); });
}

function follow() {
  let width = innerWidth;
  let pause = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    clearTimeout(pause);
    pause = setTimeout(() => { clearFilters(); drawCharts(); drawMaps(); }, 120);
  });
  for (const [id, event] of [["which", "change"], ["containing", "input"]])
    byId(id).addEventListener(event, () => { browsing.at = browsing.page = 0; drawSamples(); });
  for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
}

drawHead();
drawProvenance();
choosing();
comparing();
readAddress();
drawChoices();
showControls = controls(draw, lift);
draw();
theme();
buttons();
follow();
clearFilters();
document.documentElement.dataset.ready = "true";
