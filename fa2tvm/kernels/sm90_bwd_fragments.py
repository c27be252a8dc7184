"""What the Hopper backward does with its fragments: probabilities, dS, dQ's GEMM and its way out.

S_ij and dP_ij are held transposed (rows are keys, columns queries), so that P^T and dS^T are the
register operands of dV and dK as they stand. wgmma.py says which register holds what. `groups` are
numbers of 16 queries each: eight registers of S_ij, four words of P_ij, four floats of L_i.
"""

from tvm.script import tirx as T

from fa2tvm.kernels.wgmma import _FENCE_WORD, _PTX_TYPE, _step, _wgmma, store

_WARP_MAXIMUM = """
__device__ __forceinline__ int fa2tvm_warp_maximum(int x) {
  return __reduce_max_sync(0xFFFFFFFFu, x);
}
"""
_DRAW = """
__device__ __forceinline__ int fa2tvm_draw(float* counter) {
  return atomicAdd(reinterpret_cast<int*>(counter), 1);
}
"""


_AWAIT_TURN = """
__device__ __forceinline__ void fa2tvm_await_turn(float* turn, int number) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
  } while (seen != number);
}
"""
_PASS_TURN = """
__device__ __forceinline__ void fa2tvm_pass_turn(float* turn) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(turn) : "memory");
}
"""


def await_turn(pointer, number):
    """One thread: wait until `number` others have passed the turn."""
    T.evaluate(
        T.cuda.func_call(
            "fa2tvm_await_turn", pointer, number, source_code=_AWAIT_TURN, return_type="void"
        )
    )


def pass_turn(pointer):
    """One thread: let the next one have its turn."""
    T.evaluate(
        T.cuda.func_call("fa2tvm_pass_turn", pointer, source_code=_PASS_TURN, return_type="void")
    )


def uniform(value):
    """The largest of a warp's values, in a uniform register: what is made of it needs no others."""
    return T.cuda.func_call(
        "fa2tvm_warp_maximum", value, source_code=_WARP_MAXIMUM, return_type="int32"
    )


def draw(workspace):
    """The next number of the counter at the start of the workspace."""
    return T.cuda.func_call(
        "fa2tvm_draw", workspace.ptr_to([0]), source_code=_DRAW, return_type="int32"
    )


def load_statistics(statistics, address, groups):
    """Groups of a block's permuted L or D, four floats each, from shared memory."""
    load = T.ptx["ld.shared.v4.f32"]
    for n in groups:
        registers = (statistics[4 * n + i] for i in range(4))
        T.evaluate(load(*registers, address + T.uint32(64 * n)))


def probabilities(S_ij, L_i, scale_log2, groups):
    """S_ij = exp(softmax_scale S_ij - L_i)."""
    for i in _registers(groups):
        column = i // 4 * 2 + i % 2
        store(S_ij, i, T.exp2(S_ij[i] * scale_log2 - L_i[column]))


def hide(P_ij, first_visible, groups):
    """P_ij = 0 in columns before `first_visible` of a thread's two rows."""
    for i in _registers(groups):
        visible = T.int32(i // 4 * 8 + i % 2) >= first_visible[i // 2 % 2]
        store(P_ij, i, T.Select(visible, P_ij[i], T.float32(0.0)))


def _registers(groups):
    return range(8 * groups.start, 8 * groups.stop)


def pack_groups(words, fragment, dtype, groups):
    """The 2-byte pairs of a fragment: the order of the A operand as well."""
    convert = T.ptx[f"cvt.rn.{_PTX_TYPE[dtype]}x2.f32"]
    for i in range(4 * groups.start, 4 * groups.stop):
        T.evaluate(convert(words[i], fragment[2 * i + 1], fragment[2 * i]))


def fence_groups(words, groups):
    """`fence_words` of wgmma.py for some groups: the others need not be there yet."""
    for i in range(4 * groups.start, 4 * groups.stop):
        T.evaluate(
            T.cuda.func_call(
                "fa2tvm_fence_word", words[i], source_code=_FENCE_WORD, return_type="void"
            )
        )


def gemm_groups(accumulator, words, b_descriptor, b_tile, dtype, groups):
    """Accumulator += A B over groups of the GEMM's depth: A in words, B an mn-major tile."""
    columns = 2 * int(accumulator.shape[0])
    wgmma = _wgmma(columns, dtype)
    registers = [accumulator[i] for i in range(columns // 2)]
    for n in groups:
        operand = [words[4 * n + i] for i in range(4)]
        b = b_descriptor + T.uint64(b_tile.mn_major_offset(n))
        T.evaluate(wgmma(*registers, *operand, b, T.ptx.pred(1), 1, 1, 1))


def score_gradients(dS_ij, P_ij, dP_ij, D_i, row_bits, dtype, groups):
    """dS_ij = P_ij o (dP_ij - D_i), as 2-byte pairs; 0 in rows whose `row_bits` are 0.

    Those are keys behind the end. Their K_j is 0 in shared memory, but their P_ij may be infinite,
    and 0 times that would reach dQ_i as NaN.
    """
    convert = T.ptx[f"cvt.rn.{_PTX_TYPE[dtype]}x2.f32"]
    for word in range(4 * groups.start, 4 * groups.stop):
        i, column = 2 * word, word // 2 * 2
        low, high = (P_ij[i + c] * (dP_ij[i + c] - D_i[column + c]) for c in range(2))
        T.evaluate(convert(dS_ij[word], high, low))
        store(dS_ij, word, T.bitwise_and(dS_ij[word], row_bits[word % 2]))


def store_transposed(words, address, tile, groups):
    """Packed S^T-shaped fragment to a k-major tile [queries, keys]; see `transposed_address`."""
    write = T.ptx["stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"]
    for n in groups:
        registers = (words[4 * n + i] for i in range(4))
        T.evaluate(write(address + T.uint32(16 * n * tile.row_bytes), *registers))


def transposed_address(base, tile, box, warp, lane):
    """Where a lane's row of `store_transposed` starts: matrix lane // 8, query lane % 8 of it.

    Matrices are (queries 0-7, 8-15) x (keys 0-7, 8-15 of the warp's 16); the 128-byte swizzle xors
    the 16-byte chunk with the row.
    """
    query = T.truncdiv(lane, 16) * 8 + T.truncmod(lane, 8)
    chunk = T.bitwise_xor(warp * 2 + T.truncmod(T.truncdiv(lane, 8), 2), T.truncmod(lane, 8))
    offset = box * tile.box_bytes + query * tile.row_bytes + chunk * 16
    return base + T.Cast("uint32", offset)


def gemm_tn(
    accumulator,
    a_descriptor,
    b_descriptor,
    a_tile,
    b_tile,
    dtype,
    accumulate=False,
    b_by_rows=False,
):
    """Accumulator (+)= A^T B^T: 64 columns of an mn-major A, all rows of a k-major B.

    `b_by_rows`: A^T B of an mn-major B of 64 columns.
    """
    columns = 2 * int(accumulator.shape[0])
    wgmma = _wgmma(columns, dtype)
    registers = [accumulator[i] for i in range(columns // 2)]
    for step in range(a_tile.rows // 16):
        offset = b_tile.mn_major_offset(step) if b_by_rows else b_tile.k_major_offset(step)
        a, b = _step(a_descriptor, a_tile.mn_major_offset(step)), _step(b_descriptor, offset)
        add = T.ptx.pred(int(accumulate or step != 0))
        T.evaluate(wgmma(*registers, a, b, add, 1, 1, 1, int(b_by_rows)))


def stage(fragment, address):
    """A warp's part of an accumulator to shared memory, as it stands; `address` is the lane's."""
    write = T.ptx["st.shared.v4.f32"]
    for a in range(int(fragment.shape[0]) // 4):
        registers = (fragment[4 * a + i] for i in range(4))
        T.evaluate(write(address + T.uint32(512 * a), *registers))


def unstage(fragment, address):
    """The inverse of `stage`."""
    read = T.ptx["ld.shared.v4.f32"]
    for a in range(int(fragment.shape[0]) // 4):
        registers = (fragment[4 * a + i] for i in range(4))
        T.evaluate(read(*registers, address + T.uint32(512 * a)))


def reduce_from_registers(fragment, workspace, position):
    """Add a warp's part of an accumulator to global memory, as it stands."""
    add = T.ptx["red.relaxed.gpu.global.add.v4.f32"]
    for a in range(int(fragment.shape[0]) // 4):
        registers = (fragment[4 * a + i] for i in range(4))
        T.evaluate(add(workspace.ptr_to([position + 128 * a]), *registers))


def pack_columns(words, fragment, c, scale, dtype):
    """The c-th 32 columns of an accumulator times scale, as eight 2-byte pairs."""
    convert = T.ptx[f"cvt.rn.{_PTX_TYPE[dtype]}x2.f32"]
    for i in range(8):
        low, high = (fragment[16 * c + 2 * i + n] * scale for n in range(2))
        T.evaluate(convert(words[i], high, low))


def store_columns(pointer, words, r):
    """Row r of 32 columns from `transpose_fragment`: a lane's 16 bytes."""
    write = T.ptx["st.global.v4.b32"]
    T.evaluate(write(pointer, *(words[r + 2 * i] for i in range(4))))
