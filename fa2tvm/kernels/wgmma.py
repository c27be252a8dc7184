"""What Hopper kernels share: shared-memory tiles, TMA loads, warpgroup GEMMs, fragments.

The functions emit TensorIR statements into the program being built; sizes are Python ints, so all
register indices are constants. A warpgroup's float32 accumulator of n columns is n / 2 registers a
thread: register 4 * a + 2 * r + c holds row `lane // 4 + 8 * r` of the warp's 16 rows and column
`8 * a + 2 * (lane % 4) + c`. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from tvm.script import tirx as T

FULL_WARP = 0xFFFFFFFF
# Descriptors hold addresses in units of 16 bytes, 14 bits of them.
_UNIT_SHIFT, _ADDRESS_MASK = 4, 0x3FFF
_PTX_TYPE = {"bfloat16": "bf16", "float16": "f16"}
_FENCE_FLOAT = """
__device__ __forceinline__ void fa2tvm_fence_float(float& r) {
  asm volatile("" : "+f"(r) :: "memory");
}
"""
_FENCE_WORD = """
__device__ __forceinline__ void fa2tvm_fence_word(unsigned int& r) {
  asm volatile("" : "+r"(r) :: "memory");
}
"""


class Descriptor:
    """A wgmma descriptor in halves: the low word is a run-time number, the high one a constant.

    Steps are added to the low word alone, which never overflows, so that one register a stage is
    all that the compiler has to carry.
    """

    def __init__(self, low, high):
        self.low, self.high = low, high

    def __add__(self, offset):
        return Descriptor(self.low + T.Cast("uint32", offset), self.high)

    def value(self):
        """The 64 bits."""
        high = T.shift_left(T.uint64(self.high), T.uint64(32))
        return T.bitwise_or(T.Cast("uint64", self.low), high)


class SharedTile:
    """A tile [rows, columns] of 2-byte elements in shared memory, for TMA and wgmma.

    The columns lie in boxes of 64 (128-byte swizzle) or, where 64 does not divide them, of 32
    (64-byte swizzle); a box is [rows, box_columns], row after row.
    Source: PTX ISA, "Shared Memory Matrix Layout".
    """

    def __init__(self, rows, columns):
        self.rows = rows
        self.columns = columns
        self.box_columns = 64 if columns % 64 == 0 else 32
        self.boxes = columns // self.box_columns
        self.row_bytes = 2 * self.box_columns
        self.box_bytes = rows * self.row_bytes
        self.bytes = self.boxes * self.box_bytes
        self.elements = rows * columns
        self.tma_swizzle = 3 if self.box_columns == 64 else 2
        self._swizzle_mode = 1 if self.box_columns == 64 else 2
        self._eight_rows = (8 * self.row_bytes >> _UNIT_SHIFT) << 32

    def k_major(self, address):
        """Descriptor of the tile as an operand whose GEMM depth runs along the columns."""
        return self._descriptor(1, address)

    def mn_major(self, address):
        """Descriptor of the tile as a B operand whose GEMM depth runs along the rows."""
        return self._descriptor(self.box_bytes >> _UNIT_SHIFT, address)

    def _descriptor(self, leading, address):
        mode = T.shift_left(T.uint64(self._swizzle_mode), T.uint64(62))
        start = T.bitwise_and(
            T.shift_right(address, T.uint32(_UNIT_SHIFT)), T.uint32(_ADDRESS_MASK)
        )
        return mode + T.uint64(self._eight_rows | leading << 16) + T.Cast("uint64", start)

    def k_major_at(self, unit):
        """`k_major` of a tile that starts `unit` * 16 bytes into shared memory, in halves."""
        return self._at(1, unit)

    def mn_major_at(self, unit):
        """`mn_major` of a tile that starts `unit` * 16 bytes into shared memory, in halves."""
        return self._at(self.box_bytes >> _UNIT_SHIFT, unit)

    def _at(self, leading, unit):
        high = self._swizzle_mode << 30 | self._eight_rows >> 32
        return Descriptor(unit + T.uint32(leading << 16), high)

    def k_major_offset(self, step):
        """Descriptor offset of the step-th 16 columns."""
        per_box = self.box_columns // 16
        return (step % per_box) * 2 + (step // per_box) * (self.box_bytes >> _UNIT_SHIFT)

    def mn_major_offset(self, step):
        """Descriptor offset of the step-th 16 rows."""
        return step * (16 * self.row_bytes >> _UNIT_SHIFT)

    def stage_offset(self, stage):
        """Descriptor offset of a stage of a ring of such tiles."""
        return T.Cast("uint64", stage * (self.bytes >> _UNIT_SHIFT))

    def load(self, smem, first, tensor_map, row, head, batch, barrier):
        """One thread: TMA the tile from tensor [batch, row.., head, 0..] to element `first` on.

        Rows and columns outside the tensor arrive as zeros.
        """
        tma = T.ptx["cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"]
        for box in range(self.boxes):
            T.evaluate(
                tma(
                    smem.ptr_to([first + box * self.rows * self.box_columns]),
                    T.address_of(tensor_map),
                    box * self.box_columns,
                    row,
                    head,
                    batch,
                    barrier,
                )
            )


def shared_unit(buffer):
    """Where a buffer starts in shared memory, in units of 16 bytes, as descriptors count."""
    units = T.shift_right(shared_address(buffer), T.uint32(_UNIT_SHIFT))
    return T.bitwise_and(units, T.uint32(_ADDRESS_MASK))


def shared_address(buffer):
    """The 32-bit shared-window address of a buffer."""
    return T.cuda.cvta_generic_to_shared(buffer.ptr_to([0]))


def encode_tensor_map(tensor_map, buffer, dtype, sizes, strides, tile, rows, heads_of_box=1):
    """Host: describe a [batch, seq, heads, dim] tensor for loads of `rows` rows of a tile's boxes.

    A box of several heads holds `rows` rows of each, head after head. A dimension of size 1 may
    carry any stride, which TMA would refuse: it gets a legal one.
    """
    batch, seq, heads, dim = sizes
    batch_stride, seq_stride, head_stride = strides

    def stride_bytes(size, stride):
        return T.Select(size == T.int64(1), T.int64(2 * tile.columns), stride * T.int64(2))

    return T.evaluate(
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            tensor_map,
            dtype,
            4,
            buffer.data,
            dim,
            seq,
            heads,
            batch,
            stride_bytes(seq, seq_stride),
            stride_bytes(heads, head_stride),
            stride_bytes(batch, batch_stride),
            tile.box_columns,
            rows,
            heads_of_box,
            1,
            1,
            1,
            1,
            1,
            0,
            tile.tma_swizzle,
            2,
            0,
        )
    )


def store(buffer, index, value):
    """One register of a fragment."""
    T.buffer_store(buffer, value, [index])


def fence_floats(fragment):
    """Keep the compiler from moving uses of a float32 fragment across an asynchronous GEMM.

    The registers go by reference: TVM's own barrier takes a copy and fences nothing (0.27).
    """
    for i in range(int(fragment.shape[0])):
        T.evaluate(
            T.cuda.func_call(
                "fa2tvm_fence_float", fragment[i], source_code=_FENCE_FLOAT, return_type="void"
            )
        )


def fence_words(fragment):
    """`fence_floats` for a fragment of packed pairs."""
    for i in range(int(fragment.shape[0])):
        T.evaluate(
            T.cuda.func_call(
                "fa2tvm_fence_word", fragment[i], source_code=_FENCE_WORD, return_type="void"
            )
        )


def gemm_nt(accumulator, a, b_descriptor, a_tile, b_tile, dtype):
    """S = A B^T into accumulator; B is a k-major tile, A one too or (a_tile None) a fragment."""
    columns = 2 * int(accumulator.shape[0])
    wgmma = _wgmma(columns, dtype)
    registers = [accumulator[i] for i in range(columns // 2)]
    for step in range(b_tile.columns // 16):
        b = _step(b_descriptor, b_tile.k_major_offset(step))
        accumulate = T.ptx.pred(int(step != 0))
        if a_tile is None:
            operand = [a[4 * step + i] for i in range(4)]
            T.evaluate(wgmma(*registers, *operand, b, accumulate, 1, 1, 0))
        else:
            operand = _step(a, a_tile.k_major_offset(step))
            T.evaluate(wgmma(*registers, operand, b, accumulate, 1, 1, 0, 0))


def gemm_accumulate(accumulator, a, b_descriptor, b_tile, dtype):
    """O += A B into accumulator; A is a fragment of packed pairs, B an mn-major tile."""
    columns = 2 * int(accumulator.shape[0])
    wgmma = _wgmma(columns, dtype)
    registers = [accumulator[i] for i in range(columns // 2)]
    for step in range(b_tile.rows // 16):
        b = _step(b_descriptor, b_tile.mn_major_offset(step))
        operand = [a[4 * step + i] for i in range(4)]
        T.evaluate(wgmma(*registers, *operand, b, T.ptx.pred(1), 1, 1, 1))


def _step(descriptor, offset):
    if isinstance(descriptor, Descriptor):
        return (descriptor + T.uint32(offset)).value()
    return descriptor + T.uint64(offset)


def _wgmma(columns, dtype):
    kind = _PTX_TYPE[dtype]
    return T.ptx[f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"]


def pack_pairs(packed, fragment, dtype):
    """The 2-byte pairs of fragment[2i], fragment[2i + 1]: the order of the A operand as well."""
    convert = T.ptx[f"cvt.rn.{_PTX_TYPE[dtype]}x2.f32"]
    for i in range(int(fragment.shape[0]) // 2):
        T.evaluate(convert(packed[i], fragment[2 * i + 1], fragment[2 * i]))


def load_a_fragment(fragment, tile, address, lane, warp):
    """Q of a warpgroup (64 rows, k-major) from shared memory to the register A operand of wgmma."""
    ldmatrix = T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"]
    row = warp * 16 + lane % 16
    per_box = tile.box_columns // 16
    for step in range(tile.columns // 16):
        chunk = (step % per_box) * 2 + lane // 16
        # The swizzle xors the 16-byte chunk number with the row: all three bits of it in rows of
        # 128 bytes, two bits, one row later each second row, in rows of 64.
        swizzled = T.bitwise_xor(
            chunk, row % 8 if tile.box_columns == 64 else T.truncmod(T.truncdiv(row, 2), 4)
        )
        offset = (step // per_box) * tile.box_bytes + row * tile.row_bytes + swizzled * 16
        T.evaluate(
            ldmatrix(
                fragment[4 * step],
                fragment[4 * step + 1],
                fragment[4 * step + 2],
                fragment[4 * step + 3],
                address + T.Cast("uint32", offset),
            )
        )


def shuffle_xor(value, mask):
    """The value that the lane with the flipped bits holds."""
    return getattr(T.cuda, "__shfl_xor_sync")(T.uint32(FULL_WARP), value, mask, 32)


def broadcast(value, lane):
    """The value that a lane of the warp holds."""
    return getattr(T.cuda, "__shfl_sync")(T.uint32(FULL_WARP), value, lane, 32)


def transpose_fragment(words, columns, lane, spare):
    """Give each lane 16 consecutive bytes of its rows of a packed accumulator.

    Afterwards words 8 c + r, 8 c + r + 2, + 4, + 6 are columns 32 c + 8 (lane % 4) on of row r: a
    4x4 transpose across the lanes of a quad.
    """
    for row in range(2):
        for c in range(columns // 32):
            _transpose_quad(words, [8 * c + row + 2 * i for i in range(4)], lane, spare)


def _transpose_quad(words, ids, lane, spare):
    for mask, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
        upper = T.bitwise_and(lane, mask) != 0
        for low, high in pairs:
            a, b = ids[low], ids[high]
            store(spare, 0, shuffle_xor(T.Select(upper, words[a], words[b]), mask))
            store(spare, 1, T.Select(upper, words[b], spare[0]))
            store(words, a, T.Select(upper, spare[0], words[a]))
            store(words, b, spare[1])


def store_row(out, words, row_index, r, lane, columns):
    """Row r of a fragment from `transpose_fragment` to out[batch, seq, head, :columns]."""
    write = T.ptx["st.global.v4.b32"]
    for c in range(-(-columns // 32)):
        column = 32 * c + T.truncmod(lane, 4) * 8
        vector = write(
            out.ptr_to([*row_index, column]), *(words[8 * c + r + 2 * i] for i in range(4))
        )
        if 32 * (c + 1) <= columns:
            T.evaluate(vector)
        else:
            with T.If(column < columns), T.Then():
                T.evaluate(vector)
