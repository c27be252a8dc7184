"""What the portable GPU kernels share: swizzled shared tiles, cp.async copies, warp-level GEMMs.

The functions emit TensorIR statements into the program being built; sizes are Python ints, so all
register indices are constants. A warp's float32 accumulator of 16 rows and n columns is n / 2
registers a thread: register 4 * a + 2 * r + c holds row `lane // 4 + 8 * r` and column
`8 * a + 2 * (lane % 4) + c`, as in wgmma.py. Packed to pairs, registers 4 * k to 4 * k + 3 are the
A operand of the k-th 16 columns. Source: PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""

from tvm.script import tirx as T
from tvm.tirx.layout import S as LayoutOf
from tvm.tirx.layout import TileLayout

from fa2tvm.kernels.wgmma import store

_PTX_TYPE = {"bfloat16": "bf16", "float16": "f16"}
# Loads of operands that are under way while a GEMM's current instruction runs.
_LOOKAHEAD = 1


def strided(handle, shape, strides, dtype):
    """A tensor [batch, seq, heads, dim] of any strides that device code reads or writes.

    Device code indexes by the layout; `strides` alone is only checked on the host (TVM 0.27).
    """
    strides = [*strides, 1]
    layout = TileLayout(LayoutOf[tuple(shape) : tuple(strides)])
    return T.match_buffer(handle, shape, dtype, strides=strides, layout=layout, align=16)


class SharedTile:
    """A row-major tile [rows, columns] of 2-byte elements whose 16-byte chunks are swizzled.

    Eight rows that `ldmatrix` reads together, and the lanes that `cp.async` writes together, meet
    no bank twice: in rows of a multiple of 128 bytes the chunk number is xored with the row; where
    rows are an odd multiple of 64 bytes two rows share 128 bytes, and half of it is xored with the
    pair's number. The tile must begin at a multiple of 128 bytes.
    """

    def __init__(self, rows, columns):
        self.rows = rows
        self.columns = columns
        self.row_bytes = 2 * columns
        self.bytes = rows * self.row_bytes
        self.lanes = 8 if columns % 64 == 0 else 4

    def chunk_address(self, row, chunk):
        """Bytes from the tile's start to a chunk below `lanes` of a row, as uint32."""
        pair = row if self.lanes == 8 else T.shift_right(row, 1)
        swizzled = T.bitwise_xor(chunk, T.bitwise_and(pair, self.lanes - 1))
        return T.Cast("uint32", row * self.row_bytes + swizzled * 16)

    def step(self, address, chunk):
        """From the address of chunk 0 or 1 of a row to that of the one `chunk` (even) later."""
        near, far = chunk % self.lanes, chunk // self.lanes
        if near:
            address = T.bitwise_xor(address, T.uint32(16 * near))
        return address + T.uint32(16 * self.lanes * far) if far else address

    def rows_later(self, rows):
        """Bytes between a row and the one `rows` (a multiple of 8) later."""
        return T.uint32(rows * self.row_bytes)


class Copier:
    """How the threads of a block copy [rows, columns] of a tensor to a shared tile by cp.async.

    `lanes` threads take a row's neighbouring chunks of 16 bytes, the next ones the next row; then
    all go on to the next `stride` rows and the next boxes of columns.
    """

    def __init__(self, tile, columns, threads):
        self.tile = tile
        self.columns = columns
        self.stride = threads // tile.lanes
        self.passes = -(-tile.rows // self.stride)

    def copy(self, address, source, first_row, end):
        """Copy rows first_row on to the tile at a shared address; rows from `end` on become zeros.

        source: `Rows`. What depends on the thread is computed anew at each copy: hoisted out of
        the loop over key blocks it would take registers that the fragments need.
        """
        tile, copy = self.tile, T.ptx["cp.async.cg.shared.global"]
        box_columns = 8 * tile.lanes
        thread = bind("uint32", thread_index())[0]
        row = T.Cast("int32", T.shift_right(thread, T.uint32(tile.lanes.bit_length() - 1)))
        chunk = T.Cast("int32", T.bitwise_and(thread, T.uint32(tile.lanes - 1)))
        to = bind("uint32", address + tile.chunk_address(row, chunk))[0]
        element = source.first + T.Cast("int64", first_row + row) * source.row_stride
        offset = bind("int64", (element + T.Cast("int64", chunk * 8)) * T.int64(2))
        rows = bind("int32", end - first_row - row)[0]
        for n in range(self.passes):
            for box in range(tile.columns // box_columns):
                inside = T.int32(n * self.stride) < rows
                left = self.columns - box * box_columns
                if left < box_columns:
                    inside = T.And(inside, chunk * 8 < left)
                at = offset[0] + T.int64(2 * box * box_columns)
                statement = copy(
                    to + T.uint32(n * self.stride * tile.row_bytes + 2 * box * box_columns),
                    T.ptr_byte_offset(source.buffer.data, at, source.buffer.dtype),
                    16,
                    T.Select(inside, T.uint32(16), T.uint32(0)),
                )
                if (n + 1) * self.stride <= tile.rows:
                    T.evaluate(statement)
                else:
                    with T.If(row < tile.rows - n * self.stride), T.Then():
                        T.evaluate(statement)
            if n + 1 < self.passes:
                store(offset, 0, offset[0] + source.row_stride * T.int64(2 * self.stride))


class Rows:
    """The rows of one head of a tensor [batch, seq, heads, dim], for `Copier`."""

    def __init__(self, buffer, strides, b, h):
        batch, self.row_stride, head = strides
        self.buffer = buffer
        self.first = T.Cast("int64", b) * batch + T.Cast("int64", h) * head


_THREAD = """
__device__ __forceinline__ unsigned int fa2tvm_thread() {
  unsigned int r; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r)); return r;
}
"""


def thread_index():
    """threadIdx.x (uint32), read anew at each call."""
    return T.cuda.func_call("fa2tvm_thread", source_code=_THREAD, return_type="uint32")


def bind(dtype, value):
    """A register that holds a value."""
    register = T.alloc_local((1,), dtype)
    store(register, 0, value)
    return register


def lane_of_rows(tile, lane, first_row):
    """Where a lane reads A fragments, and B fragments of a tile whose depth are its rows.

    In bytes from the tile's start. Lanes 0 to 15 name the 16 rows of the left chunk, the others
    those of the right one.
    """
    return tile.chunk_address(first_row + T.truncmod(lane, 16), T.truncdiv(lane, 16))


def lane_of_columns(tile, lane, first_row):
    """Where a lane reads B fragments of a tile whose depth runs along its columns.

    Both chunks of the first 8 rows come first: a fragment's two registers must be neighbours.
    """
    row = T.truncmod(lane, 8) + T.truncdiv(lane, 16) * 8
    return tile.chunk_address(first_row + row, T.truncmod(T.truncdiv(lane, 8), 2))


def load_matrices(words, first, address, transposed=False):
    """Four 8x8 matrices to words first to first + 3, for each lane the row that it names."""
    kind = ".trans" if transposed else ""
    load = T.ptx[f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16"]
    T.evaluate(load(*(words[first + i] for i in range(4)), address))


def multiply(accumulator, column, a, a_first, b_low, b_high, dtype):
    """One m16n8k16: accumulator[.., 8 column on] += A B."""
    kind = _PTX_TYPE[dtype]
    mma = T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"]
    sums = [accumulator[4 * column + i] for i in range(4)]
    T.evaluate(mma(*sums, *(a[a_first + i] for i in range(4)), b_low, b_high, *sums))


def pipelined(steps):
    """Emit (load, compute) pairs with the loads `_LOOKAHEAD` steps ahead of their use.

    Each step is given the number of its operand's register set, below `OPERAND_SETS`.
    """
    for n, (load, _) in enumerate(steps[:_LOOKAHEAD]):
        load(n % OPERAND_SETS)
    for n, (_, compute) in enumerate(steps):
        if n + _LOOKAHEAD < len(steps):
            steps[n + _LOOKAHEAD][0]((n + _LOOKAHEAD) % OPERAND_SETS)
        compute(n % OPERAND_SETS)


OPERAND_SETS = _LOOKAHEAD + 1


def gemm_nt(accumulators, fragments, b_words, b_tile, b_address, depth, dtype, load_a, beside=None):
    """accumulators[m] += A[m] B^T for row tiles m; B [columns, depth] lies in shared memory.

    fragments(m, k) gives the registers of A[m]'s k-th 16 columns and the index of their first;
    load_a(k) emits what brings them there, beside(k), if given, what may run beside that step.
    b_words holds 4 * OPERAND_SETS registers.
    """
    groups = int(accumulators[0].shape[0]) // 8
    steps = []
    for k in range(depth // 16):
        for g in range(groups):

            def load(operand, k=k, g=g):
                if g == 0:
                    load_a(k)
                address = b_tile.step(b_address, 2 * k) + b_tile.rows_later(16 * g)
                load_matrices(b_words, 4 * operand, address)

            def compute(operand, k=k, g=g):
                if beside is not None and g == 0:
                    beside(k)
                for half in range(2):
                    for m, accumulator in enumerate(accumulators):
                        words, first = fragments(m, k)
                        b = (b_words[4 * operand + 2 * half + i] for i in range(2))
                        multiply(accumulator, 2 * g + half, words, first, *b, dtype)

            steps.append((load, compute))
    pipelined(steps)


def gemm_accumulate(accumulators, packed, b_words, b_tile, b_address, depth, dtype, before=None):
    """accumulators[m] += A[m] B for row tiles m; A in packed registers, B [depth, columns] shared.

    before(k), if given, emits what makes the k-th 16 columns of A; it comes one step early, so
    that it runs beside the GEMM of the step before.
    """
    pairs = int(accumulators[0].shape[0]) // 8
    steps = []
    for k in range(depth // 16):
        for n in range(pairs):

            def load(operand, k=k, n=n):
                address = b_tile.step(b_address, 2 * n) + b_tile.rows_later(16 * k)
                load_matrices(b_words, 4 * operand, address, transposed=True)

            def compute(operand, k=k, n=n):
                if before is not None and n == 0 and k + 1 < depth // 16:
                    before(k + 1)
                for half in range(2):
                    for m, accumulator in enumerate(accumulators):
                        b = (b_words[4 * operand + 2 * half + i] for i in range(2))
                        multiply(accumulator, 2 * n + half, packed[m], 4 * k, *b, dtype)

            steps.append((load, compute))
    if before is not None:
        before(0)
    pipelined(steps)
