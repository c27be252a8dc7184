// Every word of the page in English and Chinese, and the algorithms line by line.
"use strict";

// "S_ij", "m^old", "e^{m - m_i}", "P~": italics, subscripts and superscripts.
function math(text) {
  return text
    .replace(/\^T/g, "<sup>⊤</sup>")
    .replace(/(?<![_\w<])([ij])(?!\w)/g, "<i>$1</i>")
    .replace(/\b(softmax|diag|exp|max|rowmax|rowsum|log)\b/g, "<span class=fn>$1</span>")
    .replace(/\b(d?[A-Zlmd]|scale)(~?)(?:_([a-z]+))?(?![a-z\w])/g, (whole, name, tilde, sub) =>
      `<i>${name}${tilde ? "\u0303" : ""}</i>` + (sub ? `<sub>${sub}</sub>` : ""))
    .replace(/\^\{([^}]*)\}/g, "<sup>$1</sup>")
    .replace(/\^(-1|old|new)/g, "<sup>$1</sup>")
    .replace(/ - /g, " − ").replace(/-1/g, "−1").replace(/-∞/g, "−∞").replace(/ \* /g, " ∘ ");
}

const WORDS = {
  en: {
    title: "FlashAttention-2, block by block",
    lead: "One attention head, played a step at a time with real numbers.",
    forward: "Forward", backward: "Backward", pass: "Pass", version: "Algorithm",
    language: "Language", theme: "Theme",
    auto: "Auto", light: "Light", dark: "Dark",
    settings: "Setting", seq_q: "queries", seq_kv: "keys", head_dim: "head dim",
    block_q: "query block", block_kv: "key block", mask: "mask",
    full: "none", bottom_right: "causal, bottom right", top_left: "causal, top left",
    seed: "seed", softmax_scale: "scale", reset: "Reset",
    blocks: "Blocks", algorithm: "Line by line", registers: "Registers",
    shared: "Shared memory", hbm: "HBM", counts: "What it costs", warps: "How warps share a block",
    first: "First step", back: "Step back", play: "Play", pause: "Pause", next: "Next step",
    last: "Last step", speed: "Speed", position: "Position", step: "Step", line: "line",
    current: "current", done: "done", todo: "to come", skipped: "skipped", diagonal: "masked",
    raised: "raised", unchanged: "unchanged", this_step: "this step", so_far: "so far",
    total: "total", read: "HBM read, bytes", written: "HBM written, bytes",
    matmul: "matrix-product FLOPs", other: "other FLOPs", versus: "Version 1 against version 2",
    kept: "saved for the backward pass, floats a row",
    outer_i: "Outer loop: query blocks i, downwards. Inner loop: key blocks j.",
    outer_j: "Outer loop: key blocks j, to the right. Inner loop: query blocks i.",
    units: "Counted with 16-bit tensors in HBM and shared memory and 32-bit values in registers.",
    split_k: "Version 1, split-K: each warp takes some keys of K_j and V_j for all rows of Q_i. " +
      "Each holds a part of O_i, so the parts go through shared memory, wait, and are added.",
    split_q: "Version 2, split-Q: each warp takes some rows of Q_i and all keys. " +
      "Its rows of O_i are its own, so warps exchange nothing.",
    exchanged: bytes => `${bytes} bytes through shared memory for each block.`, warp: "warp",
    keys_help: "Keys: → next, ← back, space plays, Home and End, + and − speed, P pass, V version, " +
      "L language, T theme.",
    checked: "These numbers were also computed by fa2tvm/viz/trace.py, which tests compare with " +
      "reference.py. Largest difference here:",
    empty: "not on chip", block_of: "block",
    grid_label: (n, m, at) => `Grid of ${n} query blocks by ${m} key blocks. ${at}`,
    at_block: (i, j) => `Now at query block ${i}, key block ${j}.`,
    at_row: i => `Now at query block ${i}.`, at_col: j => `Now at key block ${j}.`,
    summary: (s, mask) => `${s.seq_q} × ${s.seq_kv}, d ${s.head_dim}, blocks ${s.block_q} × ` +
      `${s.block_kv}, mask ${mask}, seed ${s.seed}`,
    visited: (k, n, s) => `${k} of ${n} blocks computed, ${s} skipped.`,
  },
  zh: {
    title: "逐块演示 FlashAttention-2",
    lead: "一个注意力头，用真实数字一步一步演示。",
    forward: "前向", backward: "反向", pass: "过程", version: "算法",
    language: "语言", theme: "主题",
    auto: "自动", light: "浅色", dark: "深色",
    settings: "设置", seq_q: "查询数", seq_kv: "键数", head_dim: "头维度",
    block_q: "查询块", block_kv: "键块", mask: "掩码",
    full: "无", bottom_right: "因果，右下对齐", top_left: "因果，左上对齐",
    seed: "随机种子", softmax_scale: "缩放", reset: "重置",
    blocks: "分块", algorithm: "逐行算法", registers: "寄存器",
    shared: "共享内存", hbm: "HBM 显存", counts: "代价", warps: "warp 如何分工",
    first: "第一步", back: "上一步", play: "播放", pause: "暂停", next: "下一步",
    last: "最后一步", speed: "速度", position: "进度", step: "步骤", line: "行",
    current: "当前", done: "完成", todo: "未到", skipped: "跳过", diagonal: "带掩码",
    raised: "增大", unchanged: "不变", this_step: "本步", so_far: "累计",
    total: "总计", read: "HBM 读取（字节）", written: "HBM 写入（字节）",
    matmul: "矩阵乘 FLOPs", other: "其他 FLOPs", versus: "第 1 版与第 2 版对比",
    kept: "为反向保存（每行浮点数）",
    outer_i: "外层循环：查询块 i，自上而下。内层循环：键块 j。",
    outer_j: "外层循环：键块 j，自左向右。内层循环：查询块 i。",
    units: "HBM 与共享内存中的张量按 16 位计，寄存器按 32 位计。",
    split_k: "第 1 版 split-K：每个 warp 负责 K_j、V_j 的一部分键和 Q_i 的所有行。" +
      "每个 warp 只有 O_i 的一部分，须写入共享内存、同步后相加。",
    split_q: "第 2 版 split-Q：每个 warp 负责 Q_i 的若干行和所有键。" +
      "O_i 的这些行归它独有，warp 之间无需通信。",
    exchanged: bytes => `每块经共享内存交换 ${bytes} 字节。`, warp: "warp",
    keys_help: "按键：→ 下一步，← 上一步，空格播放，Home 与 End，+ 与 − 速度，P 过程，V 版本，" +
      "L 语言，T 主题。",
    checked: "这些数字也由 fa2tvm/viz/trace.py 算出，测试将其与 reference.py 比较。此处最大差：",
    empty: "不在片上", block_of: "块",
    grid_label: (n, m, at) => `${n} 个查询块乘 ${m} 个键块的网格。${at}`,
    at_block: (i, j) => `当前查询块 ${i}，键块 ${j}。`,
    at_row: i => `当前查询块 ${i}。`, at_col: j => `当前键块 ${j}。`,
    summary: (s, mask) => `${s.seq_q} × ${s.seq_kv}，d ${s.head_dim}，块 ${s.block_q} × ` +
      `${s.block_kv}，掩码 ${mask}，种子 ${s.seed}`,
    visited: (k, n, s) => `${n} 块中计算 ${k} 块，跳过 ${s} 块。`,
  },
};

// What a step says: [formula, English, Chinese].
const STEPS = {
  start: ["", "Q, K and V lie in HBM, cut into blocks. The results start here.",
    "Q、K、V 位于 HBM 中并分成块，结果将写在这里。"],
  load_q: ["", "Query block i goes from HBM to the chip.", "查询块 i 从 HBM 载入片上。"],
  load_qo: ["", "Query block i, and what earlier steps left for it in HBM, goes to the chip.",
    "查询块 i 以及之前各步留在 HBM 中的结果载入片上。"],
  load_kv: ["", "Key and value block j go from HBM to shared memory.", "键块与值块 j 从 HBM 载入共享内存。"],
  init: ["", "The accumulators start on chip.", "片上累加器初始化。"],
  scores: ["S_ij = scale · Q_i K_j^T", "Scores of every row with every key of the block.",
    "块内每一行与每个键的得分。"],
  mask: ["S_ij = -∞  where  key > row + offset",
    "This block crosses the diagonal: keys that a row may not see become −∞.",
    "该块跨越对角线：不可见的键置为 −∞。"],
  row_max: ["m_i = max(m_i^old, rowmax(S_ij))", "The running maximum of each row.", "每行的滑动最大值。"],
  probabilities: ["P~_ij = exp(S_ij - m_i)", "Exponentials, not yet normalised.", "指数值，尚未归一化。"],
  rescale: ["e^{m^old − m_i}",
    "The factor by which earlier sums shrink: exactly 1 where the maximum is unchanged, " +
    "0 at the first block.",
    "之前累加值的缩小因子：最大值不变处恰为 1，第一块处为 0。"],
  row_sum: ["l_i = e^{m^old − m_i} l_i + rowsum(P~_ij)", "The running sum of each row.", "每行的滑动求和。"],
  accumulate: ["O_i = diag(e^{m^old − m_i}) O_i + P~_ij V_j",
    "The output stays unnormalised. (The paper prints an inverse on diag here; it is a misprint.)",
    "输出保持未归一化。（论文此处的 diag 逆为笔误。）"],
  divide: ["O_i = diag(l_i)^-1 O_i", "One division at the end of the row block.", "行块结束时只除一次。"],
  lse: ["L_i = m_i + log(l_i)", "The log-sum-exp: all that the backward pass needs of m and l.",
    "log-sum-exp：反向只需要它。"],
  store: ["", "Results go to HBM.", "结果写回 HBM。"],
  store_all: ["", "O_i, l_i and m_i go back to HBM, to be read again for the next key block.",
    "O_i、l_i、m_i 写回 HBM，处理下一个键块时再读。"],
  skip: ["", "Blocks above the diagonal see nothing and are skipped:", "对角线以上的块不可见，直接跳过："],
  end: ["", "Done.", "完成。"],
  block_max: ["m~_ij = rowmax(S_ij)", "The maximum of each row in this block alone.", "仅在本块内的行最大值。"],
  block_probabilities: ["P~_ij = exp(S_ij - m~_ij)", "Exponentials against the block's own maximum.",
    "以本块最大值为基准的指数值。"],
  block_sum: ["l~_ij = rowsum(P~_ij)", "The sum of each row in this block.", "本块内每行求和。"],
  accumulate_divide: ["O_i = diag(l_i)^-1 (diag(l^old e^{m^old − m_i}) O_i + e^{m~ − m_i} P~_ij V_j)",
    "Version 1 normalises at every step: O is scaled up, added to and divided again.",
    "第 1 版每步都归一化：先还原 O，累加，再除一次。"],
  delta: ["D = rowsum(dO * O)", "One number a row takes the place of the softmax's full Jacobian.",
    "每行一个数，代替 softmax 的完整雅可比。"],
  dv: ["dV_j = dV_j + P_ij^T dO_i", "The value gradient of this key block grows on chip.",
    "本键块的值梯度在片上累加。"],
  dp: ["dP_ij = dO_i V_j^T", "The gradient of the probabilities.", "概率的梯度。"],
  ds: ["dS_ij = P_ij * (dP_ij - D_i)", "The gradient of the scores.", "得分的梯度。"],
  dq: ["dQ_i = dQ_i + scale · dS_ij K_j",
    "Other key blocks add to the same rows of dQ, so this is an atomic add in HBM.",
    "其他键块也累加到 dQ 的同一行，因此在 HBM 中做原子加。"],
  dk: ["dK_j = dK_j + scale · dS_ij^T Q_i", "The key gradient of this key block grows on chip.",
    "本键块的键梯度在片上累加。"],
  probabilities_divide: ["P_ij = diag(l_i)^-1 exp(S_ij - m_i)",
    "Version 1 needs both m and l, and a division for each element.",
    "第 1 版需要 m 和 l，且每个元素都要除一次。"],
};
// In the backward pass the probabilities come normalised, from the saved LSE.
const BACKWARD_STEPS = {
  probabilities: ["P_ij = exp(S_ij - L_i)", "Probabilities again from the saved LSE, already normalised.",
    "由保存的 LSE 重新得到概率，已归一化。"],
};

// Lines of the papers: [number, indent, text, Chinese where it differs].
const LISTINGS = {
  "forward 2": [
    [2, 0, "cut Q, K, V, O, L into blocks", "将 Q、K、V、O、L 分块"],
    [3, 0, "for each query block i", "对每个查询块 i"],
    [4, 1, "load Q_i", "载入 Q_i"],
    [5, 1, "O_i = 0,  l_i = 0,  m_i = -∞"],
    [6, 1, "for each key block j it sees", "对其可见的每个键块 j"],
    [7, 2, "load K_j, V_j", "载入 K_j、V_j"],
    [8, 2, "S_ij = scale · Q_i K_j^T"],
    [9, 2, "m_i = max(m_i, rowmax(S_ij)),  P~_ij = exp(S_ij - m_i),  " +
      "l_i = e^{m^old − m_i} l_i + rowsum(P~_ij)"],
    [10, 2, "O_i = diag(e^{m^old − m_i}) O_i + P~_ij V_j"],
    [12, 1, "O_i = diag(l_i)^-1 O_i"],
    [13, 1, "L_i = m_i + log(l_i)"],
    [14, 1, "write O_i, L_i", "写回 O_i、L_i"],
    [17, 0, "return O, L", "返回 O、L"],
  ],
  "forward 1": [
    [2, 0, "O = 0,  l = 0,  m = -∞  in HBM", "在 HBM 中 O = 0，l = 0，m = -∞"],
    [5, 0, "for each key block j", "对每个键块 j"],
    [6, 1, "load K_j, V_j", "载入 K_j、V_j"],
    [7, 1, "for each query block i that sees it", "对可见它的每个查询块 i"],
    [8, 2, "load Q_i, O_i, l_i, m_i", "载入 Q_i、O_i、l_i、m_i"],
    [9, 2, "S_ij = scale · Q_i K_j^T"],
    [10, 2, "m~_ij = rowmax(S_ij),  P~_ij = exp(S_ij - m~_ij),  l~_ij = rowsum(P~_ij)"],
    [11, 2, "m_i = max(m_i, m~_ij),  l_i = e^{m^old − m_i} l_i + e^{m~ − m_i} l~_ij"],
    [12, 2, "O_i = diag(l_i)^-1 (diag(l^old e^{m^old − m_i}) O_i + e^{m~ − m_i} P~_ij V_j)"],
    [13, 2, "write O_i, l_i, m_i", "写回 O_i、l_i、m_i"],
    [16, 0, "return O, l, m", "返回 O、l、m"],
  ],
  "backward 2": [
    [3, 0, "dQ = 0  in HBM", "在 HBM 中 dQ = 0"],
    [4, 0, "D = rowsum(dO * O)"],
    [5, 0, "for each key block j", "对每个键块 j"],
    [6, 1, "load K_j, V_j", "载入 K_j、V_j"],
    [7, 1, "dK_j = 0,  dV_j = 0"],
    [8, 1, "for each query block i that sees it", "对可见它的每个查询块 i"],
    [9, 2, "load Q_i, dO_i, L_i, D_i", "载入 Q_i、dO_i、L_i、D_i"],
    [10, 2, "S_ij = scale · Q_i K_j^T"],
    [11, 2, "P_ij = exp(S_ij - L_i)"],
    [12, 2, "dV_j = dV_j + P_ij^T dO_i"],
    [13, 2, "dP_ij = dO_i V_j^T"],
    [14, 2, "dS_ij = P_ij * (dP_ij - D_i)"],
    [15, 2, "dQ_i = dQ_i + scale · dS_ij K_j  (atomic)", "dQ_i = dQ_i + scale · dS_ij K_j （原子）"],
    [16, 2, "dK_j = dK_j + scale · dS_ij^T Q_i"],
    [18, 1, "write dK_j, dV_j", "写回 dK_j、dV_j"],
    [20, 0, "return dQ, dK, dV", "返回 dQ、dK、dV"],
  ],
  "backward 1": [
    [5, 0, "dQ = 0,  dK = 0,  dV = 0  in HBM", "在 HBM 中 dQ = dK = dV = 0"],
    [6, 0, "for each key block j", "对每个键块 j"],
    [7, 1, "load K_j, V_j", "载入 K_j、V_j"],
    [8, 1, "dK_j = 0,  dV_j = 0"],
    [9, 1, "for each query block i that sees it", "对可见它的每个查询块 i"],
    [10, 2, "load Q_i, O_i, dO_i, l_i, m_i", "载入 Q_i、O_i、dO_i、l_i、m_i"],
    [11, 2, "S_ij = scale · Q_i K_j^T"],
    [13, 2, "P_ij = diag(l_i)^-1 exp(S_ij - m_i)"],
    [16, 2, "dV_j = dV_j + P_ij^T dO_i"],
    [17, 2, "dP_ij = dO_i V_j^T"],
    [19, 2, "D_i = rowsum(dO_i * O_i)"],
    [20, 2, "dS_ij = P_ij * (dP_ij - D_i)"],
    [21, 2, "dQ_i = dQ_i + scale · dS_ij K_j"],
    [22, 2, "dK_j = dK_j + scale · dS_ij^T Q_i"],
    [24, 1, "write dK_j, dV_j", "写回 dK_j、dV_j"],
    [26, 0, "return dQ, dK, dV", "返回 dQ、dK、dV"],
  ],
};

// How a name of the trace is written; the rest is written as it is.
const SYMBOLS = {
  m_old: "m_i^old", m_block: "m~_ij", l_block: "l~_ij", l_old: "l_i^old",
  rescale: "e^{m^old − m}", rescale_block: "e^{m~ − m}",
};

// What a step reads, to be marked.
const USES = {
  scores: ["Q_i", "K_j"], row_max: ["S_ij", "m_old", "m_block"], probabilities: ["S_ij", "m_i", "L_i"],
  rescale: ["m_old", "m_i", "m_block"], row_sum: ["rescale", "P_ij", "rescale_block", "l_block"],
  accumulate: ["rescale", "P_ij", "V_j"], divide: ["l_i"], lse: ["m_i", "l_i"],
  block_max: ["S_ij"], block_probabilities: ["S_ij", "m_block"], block_sum: ["P_ij"],
  accumulate_divide: ["l_i", "l_old", "rescale", "rescale_block", "P_ij", "V_j"],
  probabilities_divide: ["S_ij", "m_i", "l_i"], dv: ["P_ij", "dO_i"], dp: ["dO_i", "V_j"],
  ds: ["P_ij", "dP_ij", "D_i"], dq: ["dS_ij", "K_j"], dk: ["dS_ij", "Q_i"], delta: ["dO", "O", "dO_i", "O_i"],
  load_q: ["Q", "dO", "L", "D"], load_qo: ["Q", "O", "dO", "l", "m"], load_kv: ["K", "V"],
};
