"use strict";
const byId = (id) => document.getElementById(id);
const meta = JSON.parse(byId("meta").textContent);
const unpacked = new Map();
// What is looked at: a text, one of its tokens (the focused one), and the token under the pointer, if any.
const state = { text: 0, token: 0, pointed: null };
let data, options;

const picked = (id) => Number(byId(id).value);
const format = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(3))) : "none");
const weight = (value) => (value / 65535).toFixed(3);

// A text's numbers: float32 by layer and token, n by layer, head and token, then keys and weights as uint16.
async function unpack(place) {
  if (unpacked.has(place)) return unpacked.get(place);
  const bytes = Uint8Array.from(atob(byId("data-" + place).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const { tokens, weighted, keys } = meta.texts[place];
  const layers = meta.layers.length;
  const heads = meta.heads + 1;
  const result = { measures: {} };
  let offset = 0;
  for (const { name, byHead } of meta.measures) {
    const count = layers * tokens * (byHead ? heads : 1);
    result.measures[name] = new Float32Array(buffer, offset, count);
    offset += 4 * count;
  }
  for (const name of ["keys", "before", "after"]) {
    const count = layers * heads * weighted * keys;
    result[name] = new Uint16Array(buffer, offset, count);
    offset += 2 * count;
  }
  unpacked.set(place, result);
  return result;
}

// A measure of every token, in the layer and head that are picked.
function values({ name, byHead }) {
  const { tokens } = meta.texts[state.text];
  const row = byHead ? picked("layer") * (meta.heads + 1) + picked("head") : picked("layer");
  return data.measures[name].subarray(row * tokens, (row + 1) * tokens);
}

// Of a token the keys with the greatest weights, the greatest after kriging first.
function weights(token) {
  const { tokens, weighted, keys } = meta.texts[state.text];
  const row = token - (tokens - weighted);
  if (row < 0) return null;
  const start = ((picked("layer") * (meta.heads + 1) + picked("head")) * weighted + row) * keys;
  const found = [];
  for (let place = start; place < start + keys; place++) {
    const [before, after] = [data.before[place], data.after[place]];
    if (before || after) found.push({ key: data.keys[place], before, after });
  }
  return found.sort((a, b) => b.after - a.after || b.before - a.before);
}

function shade() {
  const measure = meta.measures[picked("measure")];
  const found = values(measure);
  const sorted = Float32Array.from(found).filter(Number.isFinite).sort();
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const [low, high] = [at(0.02), at(0.98)];
  const log = measure.log && low > 0;
  const place = log ? Math.log : (value) => value;
  options.forEach((option, token) => {
    const share = high > low ? (place(found[token]) - place(low)) / (place(high) - place(low)) : 0;
    option.style.setProperty("--a", (Number.isFinite(share) ? Math.min(1, Math.max(0, share)) : 0).toFixed(3));
  });
  byId("low").textContent = sorted.length ? format(low) : "";
  byId("high").textContent = sorted.length ? format(high) : "This model has none of it.";
  byId("scale").textContent = sorted.length ? measure.label + (log ? ", on a log scale" : "") + ", ends at 2 % and 98 % of the tokens" : "";
}

function cell(row, content, className) {
  const result = document.createElement("td");
  result.className = className;
  result.textContent = content;
  row.append(result);
  return result;
}

function bar(row, value, greatest, className) {
  const result = cell(row, weight(value), "number " + className);
  const line = document.createElement("span");
  line.className = "bar";
  line.style.width = (100 * Math.min(value, greatest)) / greatest + "%";
  line.setAttribute("aria-hidden", "true");
  result.append(line);
}

function show() {
  const token = state.pointed ?? state.token;
  const { tokens, weighted, parts } = meta.texts[state.text];
  options.forEach((option, place) => {
    option.classList.toggle("shown", place === state.pointed && place !== state.token);
    option.style.removeProperty("--w");
  });
  const numbers = meta.measures.map((measure) => measure.label + " " + format(values(measure)[token]));
  const part = parts[token] === "text" ? "" : ", " + parts[token];
  byId("status").textContent = `Token ${token + 1} of ${tokens}, “${options[token].textContent.replace("\n", "")}”${part}: ${numbers.join(", ")}.`;
  const found = weights(token);
  byId("weights").hidden = found === null;
  byId("no-weights").hidden = found !== null;
  byId("no-weights").textContent = weighted
    ? `Weights are kept for the last ${weighted} of ${tokens} tokens: --weight_tokens ${tokens} keeps all.`
    : "No weights were kept: see --weight_tokens.";
  if (found === null) return;
  const head = byId("head").selectedOptions[0].textContent;
  byId("caption").textContent = `From token ${token + 1}, layer ${meta.layers[picked("layer")]}, head ${head}`;
  const rows = [];
  const rest = { before: 65535, after: 65535 };
  const greatest = Math.max(...found.flatMap(({ before, after }) => [before, after]));
  for (const { key, before, after } of found) {
    const row = document.createElement("tr");
    cell(row, key + 1, "number");
    cell(row, options[key].textContent, "tokens");
    bar(row, before, greatest, "before");
    bar(row, after, greatest, "after");
    rows.push(row);
    rest.before -= before;
    rest.after -= after;
    options[key].style.setProperty("--w", Math.min(1, Math.sqrt(after / 65535)).toFixed(3));
  }
  const others = token + 1 - found.length;
  if (others > 0) {
    const row = document.createElement("tr");
    cell(row, "", "number");
    cell(row, others === 1 ? "1 other" : others + " others", "quiet");
    bar(row, Math.max(0, rest.before), greatest, "before");
    bar(row, Math.max(0, rest.after), greatest, "after");
    rows.push(row);
  }
  byId("rows").replaceChildren(...rows);
}

function select(token, focus) {
  options[state.token].tabIndex = -1;
  options[state.token].setAttribute("aria-selected", "false");
  state.token = Math.min(Math.max(token, 0), options.length - 1);
  const option = options[state.token];
  option.tabIndex = 0;
  option.setAttribute("aria-selected", "true");
  if (focus) option.focus();
  show();
}

// The token nearest to the focused one in the next line of the text, above or below.
function line(step) {
  const here = options[state.token];
  let token = state.token;
  while (options[token] && options[token].offsetTop === here.offsetTop) token += step;
  if (!options[token]) return state.token;
  const top = options[token].offsetTop;
  let best = token;
  for (; options[token] && options[token].offsetTop === top; token += step) {
    const distance = (place) => Math.abs(options[place].offsetLeft - here.offsetLeft);
    if (distance(token) < distance(best)) best = token;
  }
  return best;
}

function onKey(event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const moves = {
    ArrowRight: () => state.token + 1,
    ArrowLeft: () => state.token - 1,
    ArrowDown: () => line(1),
    ArrowUp: () => line(-1),
    Home: () => 0,
    End: () => options.length - 1,
  };
  if (!(event.key in moves)) return;
  event.preventDefault();
  state.pointed = null;
  select(moves[event.key](), true);
}

const tokenOf = (event) => {
  const option = event.target.closest('[role="option"]');
  return option === null ? -1 : options.indexOf(option);
};

function point(token) {
  if (token === state.pointed) return;
  state.pointed = token;
  show();
}

function redraw() {
  shade();
  show();
}

async function open(place) {
  const found = await unpack(place);
  if (place !== picked("text")) return; // another was picked meanwhile
  data = found;
  state.text = place;
  state.token = 0;
  state.pointed = null;
  document.querySelectorAll('[role="listbox"]').forEach((other, number) => (other.hidden = number !== place));
  const list = byId("tokens-" + place);
  options = [...list.children];
  select(meta.texts[place].start, false);
  shade();
  list.scrollTop = options[state.token].offsetTop - list.clientHeight / 2;
}

function fill(id, texts) {
  byId(id).replaceChildren(...texts.map((text, value) => new Option(text, value)));
}

fill("layer", meta.layers.map(String));
byId("layer").value = String(meta.layers.length - 1);
fill("head", ["mean of all", ...Array.from({ length: meta.heads }, (_, head) => String(head))]);
for (const id of ["measure", "layer", "head"]) byId(id).addEventListener("change", redraw);
byId("text").addEventListener("change", () => open(picked("text")));
for (const box of document.querySelectorAll('[role="listbox"]')) {
  box.addEventListener("keydown", onKey);
  box.addEventListener("click", (event) => tokenOf(event) >= 0 && select(tokenOf(event), true));
  box.addEventListener("focusin", (event) => tokenOf(event) >= 0 && select(tokenOf(event), false));
  // A finger has no place between touches: for it a tap is all there is.
  box.addEventListener("pointermove", (event) => event.pointerType !== "touch" && tokenOf(event) >= 0 && point(tokenOf(event)));
  box.addEventListener("pointerleave", () => point(null));
}
if ("DecompressionStream" in window) open(0);
else byId("status").textContent = "This browser is too old to unpack the page's numbers.";
