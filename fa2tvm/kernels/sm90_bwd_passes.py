"""What runs before and after the sweep over key blocks: D and L of every row, dQ's conversion.

The workspace is float32: `COUNTER_FLOATS` (the tile counter, an int32, in the first), then for each
query block of each head of each batch its statistics [2 * block_q], then for each its dQ
accumulator [block_q * head_dim], then, if deterministic, for each its turns [8], int32. The
caller need not clear any of it. Statistics are LSE * log2(e), then D, each permuted in groups of
16 rows so that the thread that holds rows 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of a group finds them in
16 bytes. The accumulator is dQ^T as wgmma leaves it: [16 columns of d][8 rows][lane][4].

Source: FlashAttention-2, arXiv:2307.08691, Algorithm 2, line 4 (D) and line 15 (dQ).
"""

from tvm.script import tirx as T

from fa2tvm.kernels.softmax import LOG2_E
from fa2tvm.kernels.wgmma import pack_pairs, shuffle_xor, store
from fa2tvm.schedule.sm90_bwd import TURNS

PREPROCESS_THREADS = 256
INFINITY = float("inf")


def _load_words(words, first, pointer):
    load = T.ptx["ld.global.v4.b32"]
    T.evaluate(load(*(words[first + i] for i in range(4)), pointer))


def _clear(pointer):
    """16 bytes of zeros."""
    T.evaluate(T.ptx["st.global.v4.b32"](pointer, *(T.uint32(0) for _ in range(4))))


def _store_words(out, index, words, first, columns):
    """Eight columns of a row, where the row has them."""
    write = T.ptx["st.global.v4.b32"]
    with T.If(index[3] < columns), T.Then():
        T.evaluate(write(out.ptr_to(list(index)), *(words[first + i] for i in range(4))))


def _half(word, high, dtype):
    """One of the two numbers in a word, as float32."""
    if dtype == "bfloat16":
        bits = (
            T.bitwise_and(word, T.uint32(0xFFFF0000)) if high else T.shift_left(word, T.uint32(16))
        )
        return T.reinterpret("float32", bits)
    bits = T.shift_right(word, T.uint32(16)) if high else T.bitwise_and(word, T.uint32(0xFFFF))
    return T.Cast("float32", T.reinterpret("float16", T.Cast("uint16", bits)))


def _dot(a, b, first, dtype):
    """The product sum of eight pairs of numbers."""
    total = T.float32(0.0)
    for i in range(4):
        for high in (False, True):
            total = total + _half(a[first + i], high, dtype) * _half(b[first + i], high, dtype)
    return total


def _sum_over_lanes(total, lanes):
    """total[0] over each group of `lanes` neighbours, a power of two."""
    mask = lanes // 2
    while mask:
        store(total, 0, total[0] + shuffle_xor(total[0], mask))
        mask //= 2


def statistics_position(row):
    """Where a row's statistics stand among those of its block."""
    return (
        T.truncdiv(row, 16) * 16
        + T.truncdiv(T.truncmod(row, 8), 2) * 4
        + T.truncdiv(T.truncmod(row, 16), 8) * 2
        + T.truncmod(row, 2)
    )


@T.meta_class
class Rows:
    """A query block of preprocess: where it is, and the O and dO that a thread has of it."""

    # Rows of a thread at once. With eight the registers left room for two blocks a multiprocessor:
    # 94 us at d = 256, 8x2048, where memory needs 63 (H200, 2026-11-30).
    AT_ONCE = 4

    def __init__(self, p, z, block, thread):
        self.p, self.z, self.block = p, z, block
        self.per_pass = PREPROCESS_THREADS // p.row_lanes
        self.passes = -(-p.block_q // self.per_pass)
        at_once = min(self.passes, self.AT_ONCE)
        self.batches = -(-self.passes // at_once)
        self.at_once = at_once
        self.b = T.local_scalar("int32")
        self.h = T.local_scalar("int32")
        self.first = T.local_scalar("int32")
        self.lane_row = T.truncdiv(thread, p.row_lanes)
        self.column = T.truncmod(thread, p.row_lanes) * 8
        self.O_words = T.alloc_local((4 * at_once,), "uint32")
        self.dO_words = T.alloc_local((4 * at_once,), "uint32")
        self.D = T.alloc_local((1,), "float32")
        self.L = T.alloc_local((1,), "float32")

    @T.inline
    def begin(self):
        """Find the block."""
        z = T.meta_var(self.z)
        head: T.let = T.truncdiv(self.block, z.query_blocks)
        self.b = T.truncdiv(head, z.heads)
        self.h = head - self.b * z.heads
        self.first = (self.block - head * z.query_blocks) * self.p.block_q

    @T.inline
    def load(self, batch, O, dO):
        """Rows of O and dO, zeros behind the end."""
        p = T.meta_var(self.p)
        for n in T.unroll(self.at_once):
            for i in T.unroll(4):
                self.O_words[4 * n + i] = T.uint32(0)
                self.dO_words[4 * n + i] = T.uint32(0)
            row: T.let = (batch * self.at_once + n) * self.per_pass + self.lane_row
            seq: T.let = self.first + row
            if seq < self.z.seq_q and row < p.block_q and self.column < p.columns_v:
                _load_words(self.O_words, 4 * n, O.ptr_to([self.b, seq, self.h, self.column]))
                _load_words(self.dO_words, 4 * n, dO.ptr_to([self.b, seq, self.h, self.column]))

    @T.inline
    def write(self, batch, LSE, dLSE, workspace, has_dlse):
        """Statistics of the rows that were loaded."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        for n in T.unroll(self.at_once):
            self.D[0] = _dot(self.O_words, self.dO_words, 4 * n, p.dtype)
            _sum_over_lanes(self.D, p.row_lanes)
            row: T.let = (batch * self.at_once + n) * self.per_pass + self.lane_row
            if self.column == 0 and row < p.block_q:
                position: T.let = (
                    z.statistics_first
                    + T.Cast("int64", self.block) * T.int64(2 * p.block_q)
                    + statistics_position(row)
                )
                self.L[0] = T.float32(INFINITY)
                if self.first + row < z.seq_q:
                    self.L[0] = LSE[self.b, self.h, self.first + row]
                    if has_dlse != 0:
                        self.D[0] = self.D[0] - dLSE[self.b, self.h, self.first + row]
                nothing: T.let = self.L[0] == T.float32(-INFINITY)
                workspace[position] = T.Select(
                    nothing, T.float32(INFINITY), self.L[0] * T.float32(LOG2_E)
                )
                workspace[position + p.block_q] = self.D[0]


@T.inline
def preprocess(p, z, O, dO, LSE, dLSE, workspace, has_dlse):
    """D = rowsum(dO o O) - dLSE, L in base 2 (infinite for rows that see nothing), dQ = 0."""
    block = T.cta_id([z.query_blocks * z.batch_heads_q])
    thread = T.thread_id([PREPROCESS_THREADS])
    rows = Rows(p, z, block, thread)
    rows.begin()
    rows.load(0, O, dO)
    if z.need_dq != 0:
        dq: T.let = z.dq_first + T.Cast("int64", block) * T.int64(p.dq_floats)
        for n in T.unroll(p.dq_floats // (4 * PREPROCESS_THREADS)):
            _clear(workspace.ptr_to([dq + (n * PREPROCESS_THREADS + thread) * 4]))
    if p.deterministic:
        if thread < TURNS:
            workspace[z.turns_first + T.Cast("int64", block * TURNS + thread)] = T.float32(0.0)
    if block == 0 and thread == 0:
        workspace[0] = T.float32(0.0)
    rows.write(0, LSE, dLSE, workspace, has_dlse)
    for batch in T.unroll(rows.batches - 1):
        rows.load(batch + 1, O, dO)
        rows.write(batch + 1, LSE, dLSE, workspace, has_dlse)


@T.inline
def postprocess(p, z, workspace, dQ, softmax_scale):
    """Write dQ: softmax_scale times its accumulator, in the gradient's dtype and order.

    A thread takes two rows of 16 columns; it swaps half of them with its neighbour, so that the
    two of them write 32 bytes on end at a time.
    """
    chunks = T.meta_var(p.head_dim // 16)
    block = T.cta_id([z.query_blocks * z.batch_heads_q])
    thread = T.thread_id([p.head_dim * p.block_q // 32])
    head: T.let = T.truncdiv(block, z.query_blocks)
    b: T.let = T.truncdiv(head, z.heads)
    h: T.let = head - b * z.heads
    first: T.let = (block - head * z.query_blocks) * p.block_q
    eight: T.let = T.truncdiv(thread, 4 * chunks)
    chunk: T.let = T.truncmod(T.truncdiv(thread, 4), chunks)
    pair: T.let = T.truncmod(thread, 4)
    odd: T.let = T.truncmod(chunk, 2) != 0
    accumulator = T.alloc_local((32,), "float32")
    row_values = T.alloc_local((16,), "float32")
    words = T.alloc_local((8,), "uint32")
    swapped = T.alloc_local((1,), "uint32")
    source: T.let = (
        z.dq_first
        + T.Cast("int64", block) * T.int64(p.dq_floats)
        + (chunk * (p.block_q // 8) + eight) * 128
        + pair * 4
    )
    for i in T.unroll(8):
        T.evaluate(
            T.ptx["ld.global.v4.f32"](
                accumulator[4 * i],
                accumulator[4 * i + 1],
                accumulator[4 * i + 2],
                accumulator[4 * i + 3],
                workspace.ptr_to([source + i * 16]),
            )
        )
    for c in T.unroll(2):
        for i in T.unroll(8):
            row_values[i] = accumulator[4 * i + c] * softmax_scale
            row_values[8 + i] = accumulator[4 * i + 2 + c] * softmax_scale
        pack_pairs(words, row_values, p.dtype)
        for i in T.unroll(4):
            swapped[0] = shuffle_xor(T.Select(odd, words[i], words[4 + i]), 4)
            words[i] = T.Select(odd, swapped[0], words[i])
            words[4 + i] = T.Select(odd, words[4 + i], swapped[0])
        row: T.let = first + 8 * eight + 2 * pair + c
        column: T.let = T.truncdiv(chunk, 2) * 32 + T.truncmod(chunk, 2) * 8
        if row < z.seq_q:
            _store_words(dQ, (b, row, h, column), words, 0, p.columns_qk)
            _store_words(dQ, (b, row, h, column + 16), words, 4, p.columns_qk)
