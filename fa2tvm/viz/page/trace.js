// The trace of trace_v1.py, trace_v2.py and blocks.py, for settings that are changed in the page.
// Tests compare every event with the Python ones.
"use strict";

const TENSOR_BYTES = 2, STATISTIC_BYTES = 4;

// ---- small linear algebra -------------------------------------------------------------------
const matmul = (A, B) => A.map(a => B[0].map((_, c) => a.reduce((s, x, k) => s + x * B[k][c], 0)));
const transpose = A => A[0].map((_, c) => A.map(row => row[c]));
const each = (A, f) => A.map((row, r) => row.map((x, c) => f(x, r, c)));
const filled = (rows, cols, x) => Array.from({ length: rows }, () => Array(cols).fill(x));
const rowSum = A => A.map(row => row.reduce((s, x) => s + x, 0));
const rowMax = A => A.map(row => Math.max(...row));
const plus = (A, B) => each(A, (x, r, c) => x + B[r][c]);
const sizeOf = A => A.length * A[0].length;
const safe = x => (x === -Infinity ? 0 : x);
const clone = value => (Array.isArray(value) ? value.map(clone) : value);

// ---- inputs -----------------------------------------------------------------------------------
function mulberry32(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6D2B79F5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return (((t ^ (t >>> 14)) >>> 0) % 9 - 4) / 2;
  };
}

function inputsOf(setting) {
  const draw = mulberry32(setting.seed);
  const matrix = rows =>
    Array.from({ length: rows }, () => Array.from({ length: setting.head_dim }, draw));
  const Q = matrix(setting.seq_q), K = matrix(setting.seq_kv);
  return { Q, K, V: matrix(setting.seq_kv), dO: matrix(setting.seq_q) };
}

// ---- blocks.py --------------------------------------------------------------------------------
const ceilDiv = (a, b) => Math.ceil(a / b);
const clamp = (x, low, high) => Math.max(low, Math.min(x, high));

function makeCase(setting) {
  const { seq_q, seq_kv, block_q, block_kv } = setting;
  const causal = setting.mask !== "full";
  const offset = setting.mask === "bottom_right" ? seq_kv - seq_q : 0;
  const scale = setting.softmax_scale ?? 1 / Math.sqrt(setting.head_dim);
  const nQueryBlocks = ceilDiv(seq_q, block_q), nKeyBlocks = ceilDiv(seq_kv, block_kv);
  const visibleKeys = row => (causal ? clamp(row + offset + 1, 0, seq_kv) : seq_kv);
  const firstRow = key => (causal ? clamp(key - offset, 0, seq_q) : 0);
  return {
    setting, scale, nQueryBlocks, nKeyBlocks, ...inputsOf(setting),
    rowsOf: i => [i * block_q, Math.min((i + 1) * block_q, seq_q)],
    keysOf: j => [j * block_kv, Math.min((j + 1) * block_kv, seq_kv)],
    keyBlocks(i) {
      if (!causal) return { start: 0, fullStart: 0, fullEnd: nKeyBlocks, end: nKeyBlocks };
      const first = i * block_q, last = Math.min(first + block_q, seq_q) - 1;
      const end = ceilDiv(visibleKeys(last), block_kv), toFirst = visibleKeys(first);
      const fullEnd = toFirst === seq_kv ? nKeyBlocks : Math.floor(toFirst / block_kv);
      return { start: 0, fullStart: 0, fullEnd: Math.min(fullEnd, end), end };
    },
    queryBlocks(j) {
      if (!causal) return { start: 0, fullStart: 0, fullEnd: nQueryBlocks, end: nQueryBlocks };
      const first = j * block_kv, last = Math.min(first + block_kv, seq_kv) - 1;
      const seesAny = firstRow(first), seesAll = firstRow(last);
      const start =
        seesAny >= seq_q ? nQueryBlocks : Math.min(Math.floor(seesAny / block_q), nQueryBlocks);
      const fullStart = clamp(ceilDiv(seesAll, block_q), start, nQueryBlocks);
      return { start, fullStart, fullEnd: nQueryBlocks, end: nQueryBlocks };
    },
    hide: (S, i, j) =>
      each(S, (x, r, c) => (j * block_kv + c <= i * block_q + r + offset ? x : -Infinity)),
  };
}

function visits(seen) {
  const found = [];
  for (let b = seen.start; b < seen.end; b++)
    found.push([b, !(seen.fullStart <= b && b < seen.fullEnd)]);
  return found;
}

const leftOut = (seen, n) =>
  Array.from({ length: n }, (_, b) => b).filter(b => !(seen.start <= b && b < seen.end));

// ---- the tape ---------------------------------------------------------------------------------
function makeTape() {
  const tape = { events: [], shared: [], registers: [] };
  tape.load = (...names) => {
    for (const name of names) if (!tape.shared.includes(name)) tape.shared.push(name);
  };
  tape.hold = (...names) => {
    for (const name of names) if (!tape.registers.includes(name)) tape.registers.push(name);
  };
  tape.drop = (...names) => {
    tape.shared = tape.shared.filter(name => !names.includes(name));
    tape.registers = tape.registers.filter(name => !names.includes(name));
  };
  tape.add = (op, line, [i, j], values, [matmulFlops, otherFlops] = [0, 0],
    [read, written] = [0, 0]) => {
    tape.events.push({
      op, line, i, j,
      values: Object.fromEntries(Object.entries(values).map(([name, x]) => [name, clone(x)])),
      matmul_flops: matmulFlops, other_flops: otherFlops,
      read_bytes: read, written_bytes: written,
      shared: [...tape.shared], registers: [...tape.registers],
    });
  };
  return tape;
}

function finalOf(events) {
  return Object.assign({}, ...events.map(event => event.values));
}

function put(target, [start], rows) {
  rows.forEach((row, r) => { target[start + r] = clone(row); });
}

// ---- version 2, Algorithm 1 -------------------------------------------------------------------
function forwardV2(c) {
  const { Q, V } = c, N = Q.length, d = V[0].length, tape = makeTape();
  const O = filled(N, d, null), L = Array(N).fill(null);
  tape.add("start", 2, [null, null], { O, L });
  for (let i = 0; i < c.nQueryBlocks; i++) {
    const rows = c.rowsOf(i), Qi = Q.slice(...rows), n = Qi.length;
    tape.load("Q_i");
    tape.add("load_q", 4, [i, null], { Q_i: Qi }, [0, 0], [TENSOR_BYTES * sizeOf(Qi), 0]);
    let carried = { O: filled(n, d, 0), l: Array(n).fill(0), m: Array(n).fill(-Infinity) };
    tape.hold("m_i", "l_i", "O_i");
    tape.add("init", 5, [i, null], { O_i: carried.O, l_i: carried.l, m_i: carried.m });
    const seen = c.keyBlocks(i);
    for (const [j, masked] of visits(seen)) carried = forwardBlockV2(tape, c, i, j, masked, carried);
    const skipped = leftOut(seen, c.nKeyBlocks);
    if (skipped.length) tape.add("skip", 6, [i, null], { skipped });
    tape.drop("K_j", "V_j");
    const { l, m } = carried;
    const Oi = each(carried.O, (x, r) => x / (l[r] === 0 ? 1 : l[r]));
    tape.add("divide", 12, [i, null], { O_i: Oi }, [0, n * d]);
    const Li = m.map((x, r) => (l[r] === 0 ? -Infinity : x + Math.log(l[r])));
    tape.hold("L_i");
    tape.add("lse", 13, [i, null], { L_i: Li }, [0, 2 * n]);
    put(O, rows, Oi);
    put(L, rows, Li);
    tape.drop("Q_i", "m_i", "l_i", "O_i", "L_i");
    tape.add("store", 14, [i, null], { O, L }, [0, 0],
      [0, TENSOR_BYTES * sizeOf(Oi) + STATISTIC_BYTES * n]);
  }
  tape.add("end", 17, [null, null], {});
  return tape.events;
}

function forwardBlockV2(tape, c, i, j, masked, { O, l, m }) {
  const at = [i, j], Qi = c.Q.slice(...c.rowsOf(i));
  const Kj = c.K.slice(...c.keysOf(j)), Vj = c.V.slice(...c.keysOf(j));
  const n = Qi.length, cols = Kj.length, d = Kj[0].length;
  tape.load("K_j", "V_j");
  tape.add("load_kv", 7, at, { K_j: Kj, V_j: Vj }, [0, 0],
    [TENSOR_BYTES * (sizeOf(Kj) + sizeOf(Vj)), 0]);
  const S = scores(tape, c, i, j, masked, 8);
  const mNew = rowMax(S).map((x, r) => Math.max(x, m[r]));
  tape.hold("m_old");
  tape.add("row_max", 9, at, { m_old: m, m_i: mNew, raised: mNew.map((x, r) => x > m[r]) },
    [0, n * cols]);
  const P = each(S, (x, r) => Math.exp(x - safe(mNew[r])));
  tape.hold("P_ij");
  tape.add("probabilities", 9, at, { P_ij: P }, [0, 2 * n * cols]);
  const rescale = m.map((x, r) => Math.exp(x - safe(mNew[r])));
  tape.hold("rescale");
  tape.drop("m_old", "S_ij");
  tape.add("rescale", 9, at, { rescale }, [0, 2 * n]);
  const sums = rowSum(P), lNew = l.map((x, r) => rescale[r] * x + sums[r]);
  tape.add("row_sum", 9, at, { l_i: lNew }, [0, n * cols + n]);
  const ONew = plus(each(O, (x, r) => rescale[r] * x), matmul(P, Vj));
  tape.add("accumulate", 10, at, { O_i: ONew }, [2 * n * cols * d, n * d]);
  tape.drop("P_ij", "rescale");
  return { O: ONew, l: lNew, m: mNew };
}

// ---- version 2, Algorithm 2 -------------------------------------------------------------------
function backwardV2(c) {
  const { Q, K, V, dO } = c, N = Q.length, d = Q[0].length, tape = makeTape();
  const { O, L } = finalOf(forwardV2(c));
  const dQ = filled(N, d, 0), dK = filled(K.length, d, null), dV = filled(K.length, d, null);
  const D = rowSum(each(dO, (x, r, k) => x * O[r][k]));
  tape.add("start", 3, [null, null], { O, L, dQ, dK, dV });
  tape.add("delta", 4, [null, null], { D }, [0, 2 * N * d],
    [2 * TENSOR_BYTES * sizeOf(O), STATISTIC_BYTES * N]);
  for (let j = 0; j < c.nKeyBlocks; j++) {
    const out = openKeyBlock(tape, c, j, dQ, [6, 7]);
    const seen = c.queryBlocks(j);
    for (const [i, masked] of visits(seen)) {
      const rows = c.rowsOf(i), at = [i, j], Qi = Q.slice(...rows);
      const Li = L.slice(...rows), Di = D.slice(...rows);
      tape.load("Q_i", "dO_i");
      tape.hold("L_i", "D_i");
      tape.add("load_q", 9, at, { Q_i: Qi, dO_i: dO.slice(...rows), L_i: Li, D_i: Di }, [0, 0],
        [2 * TENSOR_BYTES * sizeOf(Qi) + 2 * STATISTIC_BYTES * Qi.length, 0]);
      const S = scores(tape, c, i, j, masked, 10);
      const P = each(S, (x, r) => Math.exp(x - safe(Li[r])));
      tape.hold("P_ij");
      tape.drop("S_ij");
      tape.add("probabilities", 11, at, { P_ij: P }, [0, 2 * sizeOf(P)]);
      gradients(tape, c, i, j, P, Di, out, [12, 13, 14, 15, 16]);
    }
    const skipped = leftOut(seen, c.nQueryBlocks);
    if (skipped.length) tape.add("skip", 8, [null, j], { skipped });
    closeKeyBlock(tape, c, j, out, dK, dV, 18);
  }
  tape.add("end", 20, [null, null], {});
  return tape.events;
}

// ---- steps of both backward passes ------------------------------------------------------------
function openKeyBlock(tape, c, j, dQ, lines) {
  const Kj = c.K.slice(...c.keysOf(j)), Vj = c.V.slice(...c.keysOf(j));
  tape.load("K_j", "V_j");
  tape.add("load_kv", lines[0], [null, j], { K_j: Kj, V_j: Vj }, [0, 0],
    [TENSOR_BYTES * (sizeOf(Kj) + sizeOf(Vj)), 0]);
  const out = { dQ, dK: each(Kj, () => 0), dV: each(Vj, () => 0) };
  tape.hold("dK_j", "dV_j");
  tape.add("init", lines[1], [null, j], { dK_j: out.dK, dV_j: out.dV });
  return out;
}

function closeKeyBlock(tape, c, j, out, dK, dV, line) {
  put(dK, c.keysOf(j), out.dK);
  put(dV, c.keysOf(j), out.dV);
  tape.drop("K_j", "V_j", "dK_j", "dV_j", "Q_i", "O_i", "dO_i", "L_i", "l_i", "m_i", "D_i");
  tape.add("store", line, [null, j], { dK, dV }, [0, 0],
    [0, TENSOR_BYTES * (sizeOf(out.dK) + sizeOf(out.dV))]);
}

function scores(tape, c, i, j, masked, line) {
  const Qi = c.Q.slice(...c.rowsOf(i)), Kj = c.K.slice(...c.keysOf(j));
  let S = each(matmul(Qi, transpose(Kj)), x => c.scale * x);
  tape.hold("S_ij");
  tape.add("scores", line, [i, j], { S_ij: S }, [2 * sizeOf(Qi) * Kj.length, sizeOf(S)]);
  if (masked) {
    S = c.hide(S, i, j);
    tape.add("mask", line, [i, j], { S_ij: S });
  }
  return S;
}

function gradients(tape, c, i, j, P, Di, out, lines) {
  const at = [i, j], [first] = c.rowsOf(i), rows = c.rowsOf(i), keys = c.keysOf(j);
  const Qi = c.Q.slice(...rows), dOi = c.dO.slice(...rows);
  const Kj = c.K.slice(...keys), Vj = c.V.slice(...keys);
  const product = 2 * sizeOf(P) * Kj[0].length;
  out.dV = plus(out.dV, matmul(transpose(P), dOi));
  tape.add("dv", lines[0], at, { dV_j: out.dV }, [product, 0]);
  const dP = matmul(dOi, transpose(Vj));
  tape.hold("dP_ij");
  tape.add("dp", lines[1], at, { dP_ij: dP }, [product, 0]);
  const dS = each(P, (p, r, k) => p * (dP[r][k] - Di[r]));
  tape.hold("dS_ij");
  tape.drop("P_ij", "dP_ij");
  tape.add("ds", lines[2], at, { dS_ij: dS }, [0, 2 * sizeOf(P)]);
  const dQij = each(matmul(dS, Kj), x => c.scale * x), moved = STATISTIC_BYTES * sizeOf(dQij);
  dQij.forEach((row, r) => { out.dQ[first + r] = out.dQ[first + r].map((x, k) => x + row[k]); });
  tape.hold("dQ_ij");
  tape.add("dq", lines[3], at, { dQ_ij: dQij, dQ: out.dQ }, [product, 2 * sizeOf(dQij)],
    [moved, moved]);
  tape.drop("dQ_ij");
  out.dK = plus(out.dK, each(matmul(transpose(dS), Qi), x => c.scale * x));
  tape.add("dk", lines[4], at, { dK_j: out.dK }, [product, sizeOf(out.dK)]);
  tape.drop("dS_ij");
}

// ---- version 1 --------------------------------------------------------------------------------
function forwardV1(c) {
  const { Q, K, V } = c, N = Q.length, d = Q[0].length, tape = makeTape();
  const hbm = { O: filled(N, d, 0), l: Array(N).fill(0), m: Array(N).fill(-Infinity) };
  tape.add("start", 2, [null, null], hbm, [0, 0],
    [0, TENSOR_BYTES * N * d + 2 * STATISTIC_BYTES * N]);
  for (let j = 0; j < c.nKeyBlocks; j++) {
    const Kj = K.slice(...c.keysOf(j)), Vj = V.slice(...c.keysOf(j));
    tape.load("K_j", "V_j");
    tape.add("load_kv", 6, [null, j], { K_j: Kj, V_j: Vj }, [0, 0],
      [TENSOR_BYTES * (sizeOf(Kj) + sizeOf(Vj)), 0]);
    const seen = c.queryBlocks(j);
    for (const [i, masked] of visits(seen)) forwardBlockV1(tape, c, i, j, masked, hbm);
    const skipped = leftOut(seen, c.nQueryBlocks);
    if (skipped.length) tape.add("skip", 7, [null, j], { skipped });
    tape.drop("K_j", "V_j");
  }
  tape.add("end", 16, [null, null], {});
  return tape.events;
}

function forwardBlockV1(tape, c, i, j, masked, hbm) {
  const at = [i, j], rows = c.rowsOf(i), Qi = c.Q.slice(...rows), Vj = c.V.slice(...c.keysOf(j));
  const O = hbm.O.slice(...rows), l = hbm.l.slice(...rows), m = hbm.m.slice(...rows);
  const n = Qi.length, cols = Vj.length, d = Qi[0].length;
  const moved = TENSOR_BYTES * sizeOf(O) + 2 * STATISTIC_BYTES * n;
  tape.load("Q_i");
  tape.hold("O_i", "l_i", "m_i");
  tape.add("load_qo", 8, at, { Q_i: Qi, O_i: O, l_i: l, m_i: m }, [0, 0],
    [TENSOR_BYTES * sizeOf(Qi) + moved, 0]);
  const S = scores(tape, c, i, j, masked, 9), mBlock = rowMax(S);
  tape.hold("m_block");
  tape.add("block_max", 10, at, { m_block: mBlock }, [0, n * cols]);
  const P = each(S, (x, r) => Math.exp(x - safe(mBlock[r])));
  tape.hold("P_ij");
  tape.drop("S_ij");
  tape.add("block_probabilities", 10, at, { P_ij: P }, [0, 2 * n * cols]);
  const lBlock = rowSum(P);
  tape.hold("l_block");
  tape.add("block_sum", 10, at, { l_block: lBlock }, [0, n * cols]);
  const mNew = m.map((x, r) => Math.max(x, mBlock[r]));
  tape.hold("m_old");
  tape.add("row_max", 11, at, { m_old: m, m_i: mNew, raised: mNew.map((x, r) => x > m[r]) },
    [0, n]);
  const rescale = m.map((x, r) => Math.exp(x - safe(mNew[r])));
  const rescaleBlock = mBlock.map((x, r) => Math.exp(x - safe(mNew[r])));
  tape.hold("rescale", "rescale_block");
  tape.drop("m_old", "m_block");
  tape.add("rescale", 11, at, { rescale, rescale_block: rescaleBlock }, [0, 4 * n]);
  const lNew = l.map((x, r) => rescale[r] * x + rescaleBlock[r] * lBlock[r]);
  tape.hold("l_old");
  tape.add("row_sum", 11, at, { l_old: l, l_i: lNew }, [0, 3 * n]);
  const PV = matmul(P, Vj);
  const ONew = each(O, (x, r, k) =>
    (rescale[r] * l[r] * x + rescaleBlock[r] * PV[r][k]) / (lNew[r] === 0 ? 1 : lNew[r]));
  tape.add("accumulate_divide", 12, at, { O_i: ONew }, [2 * n * cols * d, n + 4 * n * d]);
  put(hbm.O, rows, ONew);
  put(hbm.l, rows, lNew);
  put(hbm.m, rows, mNew);
  tape.drop("Q_i", "O_i", "l_i", "m_i", "l_old", "l_block", "P_ij", "rescale", "rescale_block");
  tape.add("store_all", 13, at, hbm, [0, 0], [0, moved]);
}

function backwardV1(c) {
  const { Q, K, dO } = c, N = Q.length, d = Q[0].length, tape = makeTape();
  const { O, l, m } = finalOf(forwardV1(c));
  const dQ = filled(N, d, 0), dK = filled(K.length, d, 0), dV = filled(K.length, d, 0);
  tape.add("start", 5, [null, null], { O, l, m, dQ, dK, dV }, [0, 0],
    [0, STATISTIC_BYTES * N * d + 2 * TENSOR_BYTES * K.length * d]);
  for (let j = 0; j < c.nKeyBlocks; j++) {
    const out = openKeyBlock(tape, c, j, dQ, [7, 8]);
    const seen = c.queryBlocks(j);
    for (const [i, masked] of visits(seen)) {
      const rows = c.rowsOf(i), at = [i, j], Qi = Q.slice(...rows), n = Qi.length;
      const Oi = O.slice(...rows), dOi = dO.slice(...rows);
      const li = l.slice(...rows), mi = m.slice(...rows);
      tape.load("Q_i", "O_i", "dO_i");
      tape.hold("l_i", "m_i");
      tape.add("load_qo", 10, at, { Q_i: Qi, O_i: Oi, dO_i: dOi, l_i: li, m_i: mi }, [0, 0],
        [3 * TENSOR_BYTES * n * d + 2 * STATISTIC_BYTES * n, 0]);
      const S = scores(tape, c, i, j, masked, 11);
      const P = each(S, (x, r) => Math.exp(x - safe(mi[r])) / (li[r] === 0 ? 1 : li[r]));
      tape.hold("P_ij");
      tape.drop("S_ij");
      tape.add("probabilities_divide", 13, at, { P_ij: P }, [0, 3 * sizeOf(P)]);
      const Di = rowSum(each(dOi, (x, r, k) => x * Oi[r][k]));
      tape.hold("D_i");
      tape.add("delta", 19, at, { D_i: Di }, [0, 2 * n * d]);
      gradients(tape, c, i, j, P, Di, out, [16, 17, 20, 21, 22]);
    }
    const skipped = leftOut(seen, c.nQueryBlocks);
    if (skipped.length) tape.add("skip", 9, [null, j], { skipped });
    closeKeyBlock(tape, c, j, out, dK, dV, 24);
  }
  tape.add("end", 26, [null, null], {});
  return tape.events;
}

// ---- entry ------------------------------------------------------------------------------------
function traceOf(setting, pass, version) {
  const c = makeCase(setting);
  if (pass === "forward") return version === 2 ? forwardV2(c) : forwardV1(c);
  return version === 2 ? backwardV2(c) : backwardV1(c);
}

// As Event.to_dict: JSON has no infinity.
function plainEvents(events) {
  return JSON.parse(JSON.stringify(events, (_, x) => (x === -Infinity ? "-inf" : x)));
}
