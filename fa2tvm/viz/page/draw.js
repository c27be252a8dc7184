// From a step and the values so far to the page; nothing here computes attention.
"use strict";

const el = id => document.getElementById(id);

// ---- numbers ----------------------------------------------------------------------------------
const INPUTS = new Set(["Q", "K", "V", "dO", "Q_i", "K_j", "V_j", "dO_i"]);

function shown(name, x) {
  if (x === null || x === undefined) return "·";
  if (x === -Infinity) return "−∞";
  const text = x.toFixed(INPUTS.has(name) ? 1 : Math.abs(x) >= 100 ? 1 : 3);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}

const grouped = n => n.toLocaleString("en").replace(/,/g, "\u2009");

// ---- one matrix -------------------------------------------------------------------------------
// What the rows and columns of a name are: queries (q), keys (k) or channels (d).
const AXES = {
  Q: "qd", K: "kd", V: "kd", O: "qd", dO: "qd", dQ: "qd", dK: "kd", dV: "kd", S: "qk", P: "qk",
  dP: "qk", dS: "qk", m: "q", l: "q", L: "q", D: "q", rescale: "q",
};
const axesOf = name => AXES[name.split("_")[0]];
const isWhole = name => !name.includes("_") && name !== "rescale";

function shapeOf(name, c, event) {
  const { setting } = c;
  if (isWhole(name)) {
    const sizes = { q: setting.seq_q, k: setting.seq_kv, d: setting.head_dim };
    return [...axesOf(name)].map(axis => sizes[axis]);
  }
  const span = ([start, end]) => end - start;
  const sizes = {
    q: event.i === null ? Math.min(setting.block_q, setting.seq_q) : span(c.rowsOf(event.i)),
    k: event.j === null ? Math.min(setting.block_kv, setting.seq_kv) : span(c.keysOf(event.j)),
    d: setting.head_dim,
  };
  return [...axesOf(name)].map(axis => sizes[axis]);
}

function largest(value) {
  const finite = value.flat().filter(Number.isFinite).map(Math.abs);
  return Math.max(...finite, 1e-9);
}

// Rows of a matrix in HBM that belong to the current block.
function currentRows(name, c, event) {
  if (!isWhole(name)) return null;
  const axis = axesOf(name)[0];
  if (axis === "q") return event.i === null ? null : c.rowsOf(event.i);
  return event.j === null ? null : c.keysOf(event.j);
}

function offsetsOf(name, c, event) {
  if (isWhole(name)) return { q: 0, k: 0, d: 0 };
  return {
    q: event.i === null ? 0 : c.rowsOf(event.i)[0],
    k: event.j === null ? 0 : c.keysOf(event.j)[0],
    d: 0,
  };
}

function matrix(name, value, view) {
  const { c, event, words, fresh, used } = view;
  const axes = axesOf(name), live = value !== undefined;
  const [rows, cols = 1] = live ? [value.length, value[0]?.length ?? 1] : shapeOf(name, c, event);
  const offsets = offsetsOf(name, c, event), band = currentRows(name, c, event);
  const flags = name === "m_i" && fresh.has(name) ? event.values.raised : null;
  const top = live ? largest(value) : 1;
  const symbol = math(SYMBOLS[name] ?? (name === "P_ij" && view.pass === "forward" ? "P~_ij" : name));
  const classes = ["mat", fresh.has(name) && "fresh", used.has(name) && "used", !live && "ghost"];
  let html = `<table class="${classes.filter(Boolean).join(" ")}" data-name="${name}">` +
    `<caption>${symbol}<span>${axes.length === 2 ? `${rows}×${cols}` : rows}</span></caption>`;
  if (axes.length === 2 && axes[1] === "k") {
    html += "<tr><td></td>" + Array.from({ length: cols }, (_, k) =>
      `<th scope="col">k${offsets.k + k}</th>`).join("") + "</tr>";
  }
  for (let r = 0; r < rows; r++) {
    const inBand = band && r >= band[0] && r < band[1];
    const state = flags ? (flags[r] ? "raised" : "unchanged") : "";
    html += `<tr class="${inBand ? "band" : ""} ${state}">` +
      `<th scope="row">${axes[0]}${offsets[axes[0]] + r}</th>`;
    for (let k = 0; k < cols; k++) {
      const x = live ? (axes.length === 2 ? value[r][k] : value[r]) : undefined;
      html += cell(name, x, top);
    }
    if (flags) {
      html += `<td class="flag"><span aria-hidden="true">${flags[r] ? "▲" : "="}</span> ` +
        `${words[state]}</td>`;
    } else if (name === "m_i") html += `<td class="flag"></td>`;
    html += "</tr>";
  }
  return html + "</table>";
}

function cell(name, x, top) {
  if (x === undefined || x === null) return `<td class="blank">·</td>`;
  const share = Number.isFinite(x) ? Math.round(34 * Math.abs(x) / top) : 0;
  const tint = x < 0 ? "var(--minus)" : "var(--plus)";
  const exact = x === -Infinity ? "-inf" : String(x);
  return `<td style="background:color-mix(in srgb, ${tint} ${share}%, transparent)" ` +
    `data-value="${exact}" title="${exact}">${shown(name, x)}</td>`;
}

// ---- the three levels of memory ---------------------------------------------------------------
const ORDER = [
  "S_ij", "P_ij", "dP_ij", "dS_ij", "m_block", "m_old", "m_i", "rescale", "rescale_block", "l_block",
  "l_old", "l_i", "L_i", "D_i", "O_i", "dQ_ij", "dK_j", "dV_j", "Q_i", "dO_i", "K_j", "V_j",
];
const HBM = {
  "forward 2": ["Q", "K", "V", "O", "L"], "forward 1": ["Q", "K", "V", "O", "l", "m"],
  "backward 2": ["Q", "K", "V", "O", "dO", "L", "D", "dQ", "dK", "dV"],
  "backward 1": ["Q", "K", "V", "O", "dO", "l", "m", "dQ", "dK", "dV"],
};

function everHeld(events, level) {
  const names = new Set(events.flatMap(event => event[level]));
  return ORDER.filter(name => names.has(name));
}

function bytesOf(names, state, width) {
  return names.reduce((sum, name) => sum + width * state[name].flat().length, 0);
}

function drawLevels(view) {
  const { event, events, state, words } = view;
  const levels = [["registers", STATISTIC_BYTES], ["shared", TENSOR_BYTES]];
  for (const [level, width] of levels) {
    el(level).innerHTML = everHeld(events, level).map(name =>
      matrix(name, event[level].includes(name) ? state[name] : undefined, view)).join("");
    el(`${level}-bytes`).textContent = `${grouped(bytesOf(event[level], state, width))} B`;
  }
  const names = HBM[`${view.pass} ${view.version}`];
  el("hbm").innerHTML = names.map(name => matrix(name, state[name], view)).join("");
  const held = names.filter(name => state[name]);
  const bytes = held.reduce((sum, name) => {
    const wide = axesOf(name).length === 1 || name === "dQ";
    return sum + (wide ? STATISTIC_BYTES : TENSOR_BYTES) * state[name].flat().length;
  }, 0);
  el("hbm-bytes").textContent = `${grouped(bytes)} B`;
  for (const id of ["registers", "shared", "hbm"]) el(id).setAttribute("aria-label", words[id]);
}

// ---- the grid ---------------------------------------------------------------------------------
function blockStates(view) {
  const { c, events, at } = view, states = new Map();
  const key = (i, j) => `${i},${j}`;
  for (let j = 0; j < c.nKeyBlocks; j++) {
    const seen = c.queryBlocks(j);
    for (const i of leftOut(seen, c.nQueryBlocks)) states.set(key(i, j), { skipped: true });
    for (const [i, masked] of visits(seen)) states.set(key(i, j), { masked });
  }
  events.forEach((event, t) => {
    if (event.i === null || event.j === null) return;
    const state = states.get(key(event.i, event.j));
    state.last = t;
    state.first ??= t;
  });
  for (const state of states.values()) {
    if (state.skipped) state.phase = "skipped";
    else if (at > state.last) state.phase = "done";
    else state.phase = at < state.first ? "todo" : "current";
  }
  return states;
}

function drawGrid(view) {
  const { c, event, words } = view, states = blockStates(view);
  const n = c.nQueryBlocks, m = c.nKeyBlocks, most = Math.max(n, m);
  const size = Math.max(7, Math.min(56, Math.floor(300 / most) - 4)), named = size >= 26;
  let html = `<span></span>`;
  for (let j = 0; j < m; j++)
    html += `<span class="head ${event.j === j ? "on" : ""}">${named ? math("K_j").replace("j<", j + "<") : ""}</span>`;
  for (let i = 0; i < n; i++) {
    html += `<span class="head ${event.i === i ? "on" : ""}">${named ? math("Q_i").replace("i</sub", i + "</sub") : ""}</span>`;
    for (let j = 0; j < m; j++) {
      const { phase, masked } = states.get(`${i},${j}`);
      html += `<span class="block ${phase} ${masked ? "diagonal" : ""}" data-block="${i},${j}"></span>`;
    }
  }
  const grid = el("grid"), counts = [...states.values()];
  grid.style.gridTemplateColumns = `${named ? 30 : 4}px repeat(${m}, ${size}px)`;
  grid.style.gridTemplateRows = `${named ? 24 : 4}px repeat(${n}, ${size}px)`;
  grid.innerHTML = html;
  const place = event.i === null ? (event.j === null ? "" : words.at_col(event.j))
    : event.j === null ? words.at_row(event.i) : words.at_block(event.i, event.j);
  const skipped = counts.filter(s => s.phase === "skipped").length;
  const done = counts.filter(s => s.phase === "done").length;
  const summary = words.visited(done, n * m - skipped, skipped);
  grid.setAttribute("aria-label", words.grid_label(n, m, `${place} ${summary}`));
  const kinds = ["current", "done", "todo"];
  if (counts.some(s => s.masked)) kinds.push("diagonal");
  if (skipped) kinds.push("skipped");
  el("legend").innerHTML = kinds.map(kind =>
    `<li><span class="block ${kind === "diagonal" ? "todo diagonal" : kind}"></span>${words[kind]}</li>`).join("");
  const byRows = view.pass === "forward" && view.version === 2;
  el("loops").textContent = byRows ? words.outer_i : words.outer_j;
}

// ---- words of the step --------------------------------------------------------------------------
function drawStep(view) {
  const { event, events, at, words, lang } = view;
  const table = view.pass === "backward" ? { ...STEPS, ...BACKWARD_STEPS } : STEPS;
  const [formula, english, chinese] = table[event.op];
  const place = [`${words.step} ${at + 1}/${events.length}`, `${words.line} ${event.line}`];
  if (event.i !== null) place.push(`i = ${event.i}`);
  if (event.j !== null) place.push(`j = ${event.j}`);
  el("where").textContent = place.join(" · ");
  el("formula").innerHTML = math(formula);
  el("say").textContent = `${lang === "zh" ? chinese : english} ${rowsSentence(view)}`.trim();
  el("listing").innerHTML = LISTINGS[`${view.pass} ${view.version}`].map(([line, indent, en, zh]) =>
    `<li value="${line}" style="--indent:${indent}" ${line === event.line ? 'class="on" aria-current="step"' : ""}>` +
    `<span>${math(lang === "zh" && zh ? zh : en)}</span></li>`).join("");
}

// What happens to the maximum of each row; of many rows, how many.
const MOST_ROWS_SAID = 6;

function rowsSentence({ c, event, words, lang }) {
  if (event.op === "skip") return event.values.skipped.join(", ");
  if (event.op !== "row_max") return "";
  const { m_old: old, m_i: now, raised } = event.values;
  const point = lang === "zh" ? "。" : ".";
  if (now.length > MOST_ROWS_SAID) {
    const n = raised.filter(Boolean).length;
    return `${words.raised}: ${n}, ${words.unchanged}: ${now.length - n}${point}`;
  }
  return now.map((x, r) => {
    const [was, is] = [shown("m_i", old[r]), shown("m_i", x)];
    const change = raised[r] ? `${words.raised} ${was} → ${is}` : `${words.unchanged} ${is}`;
    return `q${event.i * c.setting.block_q + r}: ${change}${point}`;
  }).join(" ");
}

// ---- costs --------------------------------------------------------------------------------------
const COSTS = [["read", "read_bytes"], ["written", "written_bytes"], ["matmul", "matmul_flops"],
  ["other", "other_flops"]];
const sumOf = (events, field) => events.reduce((sum, event) => sum + event[field], 0);

function drawCosts(view) {
  const { events, at, event, words, other } = view, until = events.slice(0, at + 1);
  el("counts").innerHTML = `<tr><td></td><th scope="col">${words.this_step}</th>` +
    `<th scope="col">${words.so_far}</th><th scope="col">${words.total}</th></tr>` +
    COSTS.map(([word, field]) => `<tr><th scope="row">${words[word]}</th>` +
      [event[field], sumOf(until, field), sumOf(events, field)].map((n, k) =>
        `<td data-cost="${field}" class="${n ? "" : "nought"} ${k === 1 ? "strong" : ""}">${grouped(n)}</td>`).join("") +
      "</tr>").join("");
  const [one, two] = view.version === 1 ? [events, other] : [other, events];
  const bytes = list => sumOf(list, "read_bytes") + sumOf(list, "written_bytes");
  const pairs = [
    [words.other, sumOf(one, "other_flops"), sumOf(two, "other_flops")],
    [`${words.hbm}, B`, bytes(one), bytes(two)], [words.kept, 2, 1],
  ];
  el("versus").innerHTML = pairs.map(([label, a, b]) => `<p>${label}</p>` +
    [[1, a], [2, b]].map(([version, n]) =>
      `<div class="bar ${version === view.version ? "on" : ""}"><span>v${version}</span>` +
      `<i style="width:${62 * n / Math.max(a, b, 1)}%"></i><b>${grouped(n)}</b></div>`).join("")).join("");
}

// ---- warps --------------------------------------------------------------------------------------
function drawWarps(view) {
  const { c, words } = view, { setting } = c;
  const rows = Math.min(setting.block_q, setting.seq_q), cols = Math.min(setting.block_kv, setting.seq_kv);
  const figure = (version, text, n, owner, bytes) => {
    const warps = Math.min(4, n), size = Math.max(8, Math.min(26, Math.floor(150 / Math.max(rows, cols))));
    let cells = "";
    for (let r = 0; r < rows; r++) {
      for (let k = 0; k < cols; k++) {
        const w = Math.floor(owner(r, k) * warps / n);
        cells += `<span class="warp w${w}">${size >= 18 ? w : ""}</span>`;
      }
    }
    const parts = warps > 1 ? bytes(warps) : 0;
    return `<figure class="${view.version === version ? "on" : ""}">` +
      `<div class="tiles" role="img" aria-label="${words.warp} 0–${warps - 1}" ` +
      `style="grid-template-columns:repeat(${cols}, ${size}px);grid-auto-rows:${size}px">${cells}</div>` +
      `<figcaption>${math(text)} ${words.exchanged(`<b>${grouped(parts)}</b>`)}</figcaption></figure>`;
  };
  // Every warp writes its part of O_i and one of them reads all.
  const exchanged = warps => 2 * warps * rows * setting.head_dim * STATISTIC_BYTES;
  el("warps").innerHTML =
    figure(1, words.split_k, cols, (_, k) => k, exchanged) + figure(2, words.split_q, rows, r => r, () => 0);
}
