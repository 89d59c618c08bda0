// Draws the page, and draws again what a control changes.

function drawHead() {
  byId("model").textContent = distinct(data.rows.map((row) => row.model)).join(", ");
  fill("facts", ...data.facts.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))));
  fill("remarks", ...data.remarks.map((text) => element("p", { class: "remark" }, text)));
}

function drawProvenance() {
  fill("made", ...Object.entries(data.provenance).flatMap(([title, rows]) => {
    const names = distinct(rows.flatMap((row) => Object.keys(row)));
    const columns = names.map((name) => ({ title: name, text: true, cell: (row) => element("code", {}, row[name] || DASH) }));
    return [element("h3", {}, title), element("div", { class: "scroll" }, table(columns, rows))];
  }));
  byId("made").append(element("p", { class: "note" }, "Of the hardware, a run records the kind of device. The table of settings names the hash of every cell, which covers all that can change a response."));
}

function choosing() {
  const { answers, within, batch, context } = data.choices;
  fill("within", ...answers.map((answer) => element("option", { value: answer.within }, `${answer.within} point${answer.within === 1 ? "" : "s"}`)));
  byId("within").value = String(answers.map((answer) => answer.within).find((points) => Math.abs(points - within) < 1e-6));
  byId("batch").value = batch;
  byId("context").value = context || 1;
  for (const id of ["within", "batch", "context"]) byId(id).addEventListener("input", drawChoices);
}

function draw() {
  drawCharts();
  drawMaps();
  drawTable();
  drawSamples();
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
drawChoices();
controls(draw);
draw();
theme();
follow();
clearFilters();
document.documentElement.dataset.ready = "true";
