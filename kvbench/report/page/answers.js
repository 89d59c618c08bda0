// The browser of samples: what the full cache and every policy answered to a question.

const MOST_WORDS = 1200; // of a response that is compared word by word
const ALIKE = 0.2; // responses that share less than this are not compared
const PER_PAGE = 60;

const { cells: CELLS, texts: TEXTS, questions: QUESTIONS } = data.answers;
const browsing = { at: 0, page: 0 };

const settingOf = ([cell]) => ({ policy: CELLS[cell][0], budget: CELLS[cell][1], moment: CELLS[cell][2] });
const isFull = (answer) => CELLS[answer[0]][0] === "full";

function visible(answer) {
  const setting = settingOf(answer);
  if (!shown(setting)) return false;
  return setting.policy === "full" || state.moment === ALL || !varies.moment || setting.moment === state.moment;
}

// The full cache of live dialogues has answers of its own.
function fullOf(question, answer) {
  const turns = (each) => CELLS[each[0]][2] === "turns";
  return question.answers.find((each) => isFull(each) && turns(each) === turns(answer));
}

function questionsShown() {
  const task = state.task === ALL ? "" : JSON.parse(state.task)[1];
  const group = state.task === ALL || task ? null : JSON.parse(state.task)[0];
  const tasks = group === null ? null : new Set(data.rows.filter((row) => row.group === group).map((row) => row.task));
  const which = byId("which").value;
  const wanted = byId("containing").value.toLowerCase();
  const higher = new Map(data.rows.map((row) => [row.task, row.higher]));
  return QUESTIONS.filter((question) => {
    if (task ? question.task !== task : tasks && !tasks.has(question.task)) return false;
    if (["model", "length", "seed"].some((name) => state[name] !== ALL && String(question[name]) !== state[name])) return false;
    const answers = question.answers.filter(visible);
    if (wanted && ![...question.target, ...answers.map((answer) => TEXTS[answer[1]])].some((text) => text.toLowerCase().includes(wanted))) return false;
    if (which === "all") return true;
    const sign = higher.get(question.task) ? 1 : -1;
    return answers.some((answer) => {
      const full = fullOf(question, answer);
      if (!full || full[2] === null || answer[2] === null) return false;
      const gap = sign * (answer[2] - full[2]);
      return which === "worse" ? gap < 0 : which === "better" ? gap > 0 : gap !== 0;
    });
  });
}

// --- what differs ---------------------------------------------------------------------------------

// What `text` has of `base`; null if they have little in common. The words of both as [kind, words] with kind "same", "ins" (only in `text`) or "del" (only in `base`).
function difference(base, text) {
  const [a, b] = [base, text].map((each) => each.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || []);
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const parts = [["same", a.slice(0, start)]];
  const [left, right] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  if (left.length > MOST_WORDS || right.length > MOST_WORDS) parts.push(["del", left], ["ins", right]);
  else parts.push(...aligned(left, right));
  parts.push(["same", a.slice(a.length - end)]);
  const shared = parts.filter(([kind]) => kind === "same").flatMap(([, words]) => words).filter((word) => word.trim()).length;
  if (shared < ALIKE * Math.max(a.length, b.length)) return null;
  return parts.filter(([, words]) => words.length);
}

// The longest common subsequence of two lists of words.
function aligned(a, b) {
  const wide = b.length + 1;
  const common = new Uint16Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      common[i * wide + j] = a[i] === b[j] ? common[(i + 1) * wide + j + 1] + 1
        : Math.max(common[(i + 1) * wide + j], common[i * wide + j + 1]);
  const parts = [];
  const add = (kind, word) => {
    if (parts.length && parts[parts.length - 1][0] === kind) parts[parts.length - 1][1].push(word);
    else parts.push([kind, [word]]);
  };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { add("same", a[i++]); j++; }
    else if (i < a.length && (j === b.length || common[(i + 1) * wide + j] >= common[i * wide + j + 1])) add("del", a[i++]);
    else add("ins", b[j++]);
  }
  return parts;
}

function response(text, base) {
  const body = element("pre", { dir: "auto" });
  const parts = base === null ? null : difference(base, text);
  if (!parts) body.append(text);
  else for (const [kind, words] of parts) body.append(kind === "same" ? words.join("") : element(kind, {}, words.join("")));
  return body;
}

// --- drawing --------------------------------------------------------------------------------------

const UNITS = new Map(data.rows.map((row) => [row.task, row.unit]));

function scoreBadge(answer, full, question) {
  const higher = data.rows.find((row) => row.task === question.task).higher ? 1 : -1;
  const gap = full && answer[2] !== null && full[2] !== null ? higher * (answer[2] - full[2]) : 0;
  const kind = gap < 0 ? "bad" : gap > 0 ? "good" : "";
  return element("span", { class: `badge ${kind}` }, `score ${score(answer[2], UNITS.get(question.task))}`);
}

function cards(question) {
  const answers = question.answers.filter(visible);
  const full = answers.filter(isFull).map((answer) =>
    card(question, [answer], ["full", CELLS[answer[0]][2]].filter(Boolean).join(", "), null));
  // Settings that gave the same response share a card.
  const groups = d3.groups(answers.filter((answer) => !isFull(answer)), (answer) =>
    JSON.stringify([answer[1], answer[2], CELLS[answer[0]][2] === "turns"])).map(([, group]) => group);
  const others = groups.map((group) => {
    const base = fullOf(question, group[0]);
    return card(question, group, null, base || null);
  });
  return [...full, ...others];
}

function card(question, group, name, base) {
  const [answer] = group;
  const settings = group.map((each) => {
    const { policy, budget, moment } = settingOf(each);
    return element("span", { class: "setting" }, [policyTitle(policy), budget].join(" at ") + (varies.moment ? `, ${moment}` : ""));
  });
  const same = base && TEXTS[base[1]] === TEXTS[answer[1]];
  const ended = answer[3] === "length" ? "cut at the limit" : answer[3] === "error" ? "failed" : "";
  const head = element("header", {},
    ...(name ? [element("strong", {}, name)] : settings), element("span", { class: "spacer" }),
    same ? element("span", { class: "soft" }, "as full") : null,
    ended ? element("span", { class: "soft" }, ended) : null,
    element("span", { class: "soft" }, `${answer[4]} tokens`), scoreBadge(answer, base, question));
  const body = same ? null : response(TEXTS[answer[1]], base ? TEXTS[base[1]] : null);
  return element("div", { class: name ? "card full" : "card" }, head, body);
}

const titleOf = (question) => `${question.task} #${question.doc_id}${question.question_id ? `, question ${question.question_id}` : ""}${question.repeat ? `, repeat ${question.repeat}` : ""}`;

// The stored part of the prompt: what surrounds the reference answers, and the end. Every second part is a reference.
function promptOf({ prompt }) {
  if (!prompt.join("")) return [];
  const title = prompt.length > 1 ? ["Prompt, where it has the ", element("mark", {}, "reference"), " and at its end"]
    : ["End of the prompt. The stored part of it does not have the reference word for word"];
  return [element("p", { class: "soft" }, ...title), element("pre", { class: "prompt", dir: "auto", tabindex: "0" },
    ...prompt.map((text, index) => (index % 2 ? element("mark", {}, text) : text)))];
}

function drawAnswer(found) {
  const question = found[browsing.at];
  if (!question) return fill("answer", element("p", { class: "soft" }, "No question to show."));
  const go = (to) => () => { browsing.at = to; browsing.page = Math.floor(to / PER_PAGE); drawSamples(); };
  const step = (text, to, label) => {
    const made = element("button", { type: "button", "aria-label": label, onclick: go(to) }, text);
    made.disabled = to < 0 || to >= found.length;
    return made;
  };
  const facts = [
    ["reference", question.target.join(" · ") || DASH],
    ["context", `${question.context_tokens} tokens, question ${question.question_tokens}`],
    ["sample", question.sample_id],
    ...(varies.model ? [["model", question.model]] : []),
    ...(varies.length ? [["length", tokens(question.length)]] : []),
    ...Object.entries(question.extra),
  ];
  fill("answer",
    element("div", { class: "step" }, step("←", browsing.at - 1, "Previous question"), step("→", browsing.at + 1, "Next question"),
      element("strong", {}, titleOf(question)), element("span", { class: "soft" }, `${browsing.at + 1} of ${found.length}`)),
    element("dl", {}, ...facts.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", { dir: "auto" }, text)))),
    ...promptOf(question),
    element("p", { class: "note" }, "Compared with the full cache: ", element("ins", {}, "only here"), " ", element("del", {}, "only in full"),
      ". Responses that share little are not compared."),
    element("div", { class: "stack" }, ...cards(question)));
  const needle = document.querySelector("#answer .prompt mark");
  if (needle) needle.parentElement.scrollTop = needle.offsetTop - needle.offsetHeight;
}

function drawSamples() {
  const found = questionsShown();
  browsing.at = Math.min(browsing.at, Math.max(0, found.length - 1));
  const pages = Math.ceil(found.length / PER_PAGE);
  browsing.page = Math.min(browsing.page, Math.max(0, pages - 1));
  const first = browsing.page * PER_PAGE;
  const items = found.slice(first, first + PER_PAGE).map((question, index) => {
    const answers = question.answers.filter((answer) => visible(answer) && !isFull(answer));
    const same = answers.filter((answer) => { const full = fullOf(question, answer); return full && full[2] === answer[2]; }).length;
    const at = first + index;
    return element("button", { type: "button", "aria-current": at === browsing.at, onclick: () => { browsing.at = at; drawSamples(); } },
      titleOf(question), element("small", {}, `${same} of ${answers.length} settings score as full`));
  });
  const turn = (text, to) => {
    const made = element("button", { type: "button", onclick: () => { browsing.page = to; browsing.at = to * PER_PAGE; drawSamples(); } }, text);
    return to >= 0 && to < pages ? made : null;
  };
  const kept = byId("questions").scrollTop;
  fill("questions", ...items, ...[turn("← earlier", browsing.page - 1), turn("later →", browsing.page + 1)].filter(Boolean));
  if (!items.length) byId("questions").append(element("p", { class: "soft" }, "No question matches."));
  byId("questions").scrollTop = kept;
  const { total } = data.answers;
  byId("sample-note").textContent = QUESTIONS.length < total
    ? `${QUESTIONS.length} of ${total} questions are in this page, the first of every task; all are in samples.parquet.` : "";
  drawAnswer(found);
  writeAddress();
}
