// The filters in the address of the page, so that a link shows what its sender saw.

const SELECTED = ["task", ...varying, "memory"];
const TYPED = ["within", "batch", "context", "against", "which", "containing"];
const SETS = { policy: ["policies", data.policies.map((policy) => policy.name)], budget: ["budgets", budgets] };
const beginning = {};

// Applies an address. Values that the page does not know are left out. Call it before the controls are built.
function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const name of SELECTED) if (asked.has(name)) state[name] = asked.get(name);
  for (const [key, [name, known]] of Object.entries(SETS))
    if (asked.has(key)) state[name] = new Set(asked.getAll(key).filter((value) => known.includes(value)));
  const [column, down] = (asked.get("sort") || "").split(".");
  if (/^\d+$/.test(column)) state.sort = { column: +column, down: down === "down", touched: true };
  for (const id of TYPED) {
    const box = byId(id);
    beginning[id] = box.value;
    if (!asked.has(id)) continue;
    box.value = asked.get(id);
    if (box.selectedIndex === -1) box.value = beginning[id];
  }
  if (/^\d+$/.test(asked.get("question") || "")) browsing.at = +asked.get("question");
  browsing.page = Math.floor(browsing.at / PER_PAGE);
}

function writeAddress() {
  const chosen = new URLSearchParams();
  const usual = { memory: "held", task: taskOptions()[0][0] };
  for (const name of SELECTED) if (state[name] !== (usual[name] || ALL)) chosen.set(name, state[name]);
  for (const [key, [name, known]] of Object.entries(SETS)) {
    if (state[name].size === known.length) continue;
    for (const value of state[name].size ? state[name] : [""]) chosen.append(key, value);
  }
  if (state.sort.touched) chosen.set("sort", `${state.sort.column}.${state.sort.down ? "down" : "up"}`);
  for (const id of TYPED) if (byId(id).value !== beginning[id]) chosen.set(id, byId(id).value);
  if (browsing.at) chosen.set("question", browsing.at);
  const text = String(chosen);
  if (text !== location.hash.slice(1)) history.replaceState(null, "", text ? `#${text}` : location.href.split("#")[0]);
}
