// The data, what the reader has chosen to see, and the controls for it.

const data = JSON.parse(byId("data").textContent);

// What tells panels apart; another page than the report can add to it.
const PLACE = ["model", "group", "length", "moment", "seed", ...(data.place || [])];
const ALL = "\u0000all";
const MEAN = "";

const place = (row) => JSON.stringify(PLACE.map((name) => row[name]));
const varies = Object.fromEntries(
  [...PLACE, "task"].map((name) => [name, distinct(data.rows.map((row) => row[name])).length > 1]));
const varying = PLACE.filter((name) => name !== "group" && varies[name]);
const budgets = distinct(data.rows.filter((row) => row.policy !== "full").map((row) => row.budget))
  .sort((a, b) => /^\d+$/.test(a) - /^\d+$/.test(b) || a - b);
const informed = new Set(data.rows.filter((row) => row.informed).map((row) => row.policy));
const policyTitle = (policy) => (informed.has(policy) ? `${policy} (informed)` : policy);
const lookOf = new Map(data.policies.map((policy, index) => [policy.name, index]));

const state = {
  task: null, // the first of the options
  ...Object.fromEntries(PLACE.map((name) => [name, ALL])),
  policies: new Set(data.policies.map((policy) => policy.name)),
  budgets: new Set(budgets),
  sort: { column: 0, down: false },
  memory: "held",
  several: false, // whether a click adds to the choice
};
const allPolicies = () => state.policies.size === data.policies.length;

const readsFew = data.rows.some((row) => row.policy !== "full" && row.score !== null && row.kv_bytes_read < row.kv_bytes_live);
const tokensKnown = data.rows.some((row) => row.policy !== "full" && row.held_tokens);

// What scores are drawn against: what is read only where a policy reads less than it holds, tokens only where the
// number of KV heads is known. `unit` is one hundredth of the full cache, or one token.
const MEMORY = {
  held: { share: "share", bytes: "kv_bytes_live", label: "KV cache held", axis: "% of full", unit: 0.01 },
  ...(readsFew ? { read: { share: "read_share", bytes: "kv_bytes_read", label: "KV cache read per step", axis: "% of full", unit: 0.01 } } : {}),
  ...(tokensKnown ? { tokens: { share: "held_tokens", bytes: "held_tokens", label: "tokens held", axis: "per KV head", unit: 1 } } : {}),
  ...(tokensKnown && readsFew ? { read_tokens: { share: "read_tokens", bytes: "read_tokens", label: "tokens read per step", axis: "per KV head", unit: 1 } } : {}),
};
const holdsCodes = data.rows.some((row) => /:(bits|key_channels)=/.test(row.policy));

const shown = (row) => row.policy === "full" || (state.policies.has(row.policy) && state.budgets.has(row.budget));
const inBudget = (row) => row.policy === "full" || state.budgets.has(row.budget);

const named = { length: tokens, seed: (seed) => `seed ${seed}`, moment: (m) => m || "no compression" };
const nameOf = (name, value) => (named[name] || String)(value);

function placeTitle(row) {
  return varying.map((name) => nameOf(name, row[name])).join(", ");
}

const meanTitle = (row) => `mean of ${row.tasks} tasks`;

// --- which rows -----------------------------------------------------------------------------------

function matches(row, { anyTask = false } = {}) {
  if (varying.some((name) => state[name] !== ALL && String(row[name]) !== state[name])) return false;
  if (anyTask || state.task === ALL) return true;
  const [group, task] = JSON.parse(state.task);
  return row.group === group && row.task === task;
}

// Rows that belong in one chart: a task, or the mean of a group, at one place.
function views() {
  const found = new Map();
  for (const row of data.rows) {
    if (!matches(row)) continue;
    const key = JSON.stringify([place(row), row.task]);
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(row);
  }
  return [...found.values()];
}

// --- controls -------------------------------------------------------------------------------------

function select(label, name, options, redraw) {
  const box = element("select", { id: `select-${name}` },
    ...options.map(([value, text]) => element("option", { value }, text)));
  if (!options.some(([value]) => value === state[name])) state[name] = options[0][0];
  box.value = state[name];
  box.addEventListener("change", () => {
    state[name] = box.value;
    redraw();
  });
  return element("label", {}, label, box);
}

function taskOptions() {
  const found = new Map();
  for (const row of data.rows) {
    const key = JSON.stringify([row.group, row.task]);
    if (!found.has(key)) found.set(key, row.task === MEAN ? `${row.group}: ${meanTitle(row)}` : row.task);
  }
  const options = [...found];
  if (options.length > 1) options.push([ALL, "every task and mean"]);
  return options.length ? options : [[ALL, "none"]];
}

// A click chooses one name alone, and a second click all; with `several`, Ctrl or Shift it adds or removes the name.
function choose(names, chosen, name, adds) {
  const alone = chosen.size === 1 && chosen.has(name);
  if (adds) {
    if (!chosen.delete(name)) chosen.add(name);
  } else {
    chosen.clear();
    for (const each of alone ? names : [name]) chosen.add(each);
  }
}

function chips(id, label, names, chosen, draw, redraw, onhover = null) {
  const chip = (name) => {
    const made = element("button", { type: "button", class: "chip", "aria-pressed": chosen.has(name), onclick: (event) => {
      choose(names, chosen, name, state.several || event.ctrlKey || event.metaKey || event.shiftKey);
      redraw();
    } }, ...draw(name));
    if (onhover) for (const [event, value] of [["pointerenter", name], ["focus", name], ["pointerleave", null], ["blur", null]])
      made.addEventListener(event, () => onhover(value));
    return made;
  };
  const all = element("button", { type: "button", class: "chip all", onclick: () => {
    const every = chosen.size === names.length;
    chosen.clear();
    if (!every) names.forEach((name) => chosen.add(name));
    redraw();
  } }, label);
  const toggles = names.map(chip);
  fill(id, all, ...toggles);
  return () => toggles.forEach((made, index) => {
    made.setAttribute("aria-pressed", chosen.has(names[index]));
    made.replaceChildren(...draw(names[index]));
  });
}

function severalChip() {
  const made = element("button", { type: "button", class: "chip all", "aria-pressed": state.several, title: "A click adds a policy or a budget, or removes it; so does Ctrl-click", onclick: () => {
    state.several = !state.several;
    made.setAttribute("aria-pressed", state.several);
  } }, "choose several");
  return made;
}

// Builds the controls, and returns a function that shows the choice in them.
function controls(redraw, onhover) {
  const boxes = [select("task", "task", taskOptions(), redraw)];
  for (const name of varying) {
    const values = distinct(data.rows.map((row) => row[name]));
    boxes.push(select(name, name, [[ALL, "all"], ...values.map((v) => [String(v), nameOf(name, v)])], redraw));
  }
  if (Object.keys(MEMORY).length > 1) boxes.push(select("front over", "memory", Object.entries(MEMORY).map(([name, { label }]) => [name, label]), redraw));
  else state.memory = "held";
  fill("selects", ...boxes);
  const refreshers = [
    chips("policies", "all policies", data.policies.map((p) => p.name), state.policies, (name) => [swatch(name), policyTitle(name)], redraw, onhover),
    chips("budgets", "all budgets", budgets, state.budgets, (name) => [name], redraw),
  ];
  byId("policies").prepend(severalChip());
  return () => refreshers.forEach((refresh) => refresh());
}

// What the filters show, in words: for print, where the controls are hidden.
function filterText() {
  const boxes = [...byId("selects").querySelectorAll("label")].map((label) => `${label.firstChild.textContent}: ${label.lastChild.selectedOptions[0].textContent}`);
  const chosen = (label, names, every) => (names.size === every ? [] : [`${label}: ${[...names].join(", ") || "none"}`]);
  return [...boxes, ...chosen("policies", state.policies, data.policies.length), ...chosen("budgets", state.budgets, budgets.length)].join(" · ");
}
