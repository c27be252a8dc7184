"""The online softmax of Algorithm 1 on wgmma accumulators: emitters over a thread's two rows.

`S_ij` and `O_i` are accumulators (wgmma.py says which register holds what), `m_i` the running
maximum of the unscaled S, `l_i` this thread's part of the running sum. Exponentials are base 2, and
a weight is 2**weight_log2 for a logit that equals m_i:

    exp2(s * scale_log2 - scaled_m),   scaled_m = m_i * scale_log2 - weight_log2   (one FMA)
    exp2((s - scaled_m) * scale_log2 + weight_log2),   scaled_m = m_i   (`exact`)

The first form rounds m_i * scale_log2. All weights of a row share that error and L_i takes it back,
but for logits of millions it alone leaves the range of the weights; the second does not round.
"""

from tvm.script import tirx as T

from fa2tvm.kernels.wgmma import FULL_WARP, shuffle_xor, store

NEGATIVE_INFINITY = -float("inf")
ROWS = range(2)
# Up to here the FMA form rounds a scaled maximum by 2**-14 at most.
SCALED_MAXIMUM_LIMIT = 1024.0
_MAX_NAN = """
__device__ __forceinline__ float fa2tvm_max_nan(float a, float b) {
  float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
"""


def row_elements(fragment, row):
    """The registers of an accumulator that belong to a thread's row 0 or 1."""
    n = int(fragment.shape[0])
    return [fragment[4 * a + 2 * row + c] for a in range(n // 4) for c in range(2)]


def maximum(a, b):
    """The larger of two numbers, NaN if one is NaN (max alone drops a NaN)."""
    return T.cuda.func_call("fa2tvm_max_nan", a, b, source_code=_MAX_NAN, return_type="float32")


def reduce_chains(chains, values, op, seed=None):
    """Reduce values in independent chains: the latency of one hides behind the others."""
    n = int(chains.shape[0])
    for i in range(n):
        store(chains, i, values[i] if seed is None or i else op(seed, values[i]))
    for i, value in enumerate(values[n:]):
        store(chains, i % n, op(chains[i % n], value))
    while n > 1:
        n //= 2
        for i in range(n):
            store(chains, i, op(chains[i], chains[i + n]))
    return chains[0]


def row_maxima(S_ij, m_i, chains, previous=None):
    """m_i = max(previous, rowmax(S_ij)) over the four lanes that share a row."""
    for r in ROWS:
        seed = None if previous is None else previous[r]
        store(m_i, r, reduce_chains(chains[r], row_elements(S_ij, r), maximum, seed))
    for mask in (1, 2):
        for r in ROWS:
            store(m_i, r, maximum(m_i[r], shuffle_xor(m_i[r], mask)))


def row_sums(P_ij, l_i, chains, first):
    """l_i = (0 if first else l_i) + this thread's part of rowsum(P_ij)."""
    for r in ROWS:
        seed = None if first else l_i[r]
        store(l_i, r, reduce_chains(chains[r], row_elements(P_ij, r), lambda a, b: a + b, seed))


def mask_beyond(S_ij, last_key, row_step):
    """-inf where column 8 a + c, counted from this lane's first, exceeds last_key + row_step r."""
    for a in range(int(S_ij.shape[0]) // 4):
        for c in range(2):
            for r in ROWS:
                i = 4 * a + 2 * r + c
                visible = T.int32(8 * a + c) <= last_key + row_step * r
                store(S_ij, i, T.Select(visible, S_ij[i], T.float32(NEGATIVE_INFINITY)))


def exponentials(S_ij, scaled_m, scale_log2, weight_log2=0, exact=False):
    """S_ij = the weights of the logits S_ij."""
    for i in range(int(S_ij.shape[0])):
        by = scaled_m[i // 2 % 2]
        exponent = (
            (S_ij[i] - by) * scale_log2 + T.float32(weight_log2)
            if exact
            else S_ij[i] * scale_log2 - by
        )
        store(S_ij, i, T.exp2(exponent))


def scaled_maxima(scaled_m, m_i, scale_log2, weight_log2=0, exact=False):
    """What the exponentials subtract; 0 for a row that saw nothing: exp(-inf - -inf) must be 0."""
    for r in ROWS:
        nothing = m_i[r] == T.float32(NEGATIVE_INFINITY)
        value = m_i[r] if exact else m_i[r] * scale_log2 - T.float32(weight_log2)
        store(scaled_m, r, T.Select(nothing, T.float32(0.0), value))


def keep_lazy_maxima(m_i, m_old, moved, any_moved, scale_log2, lazy_rescale):
    """m_i = m_old again where it grew by less than 2**lazy_rescale; `moved` says where not."""
    for r in ROWS:
        small = (m_i[r] - m_old[r]) * scale_log2 <= T.float32(lazy_rescale)
        store(moved, r, T.Select(small, 0, 1))
        store(m_i, r, T.Select(moved[r] == 0, m_old[r], m_i[r]))
    store(any_moved, 0, T.cuda.any_sync(T.uint32(FULL_WARP), T.bitwise_or(moved[0], moved[1])))


def any_distrusted(l_i, m_i, limit_log2, scaled_m=None):
    """Whether a row of the warp has too large a sum, no maximum, or one that FMA rounds too much.

    A NaN passes: it is in O_i already.
    """
    failed = []
    for r in ROWS:
        nothing = m_i[r] == T.float32(NEGATIVE_INFINITY)
        failed.append(T.Or(l_i[r] > T.float32(2.0**limit_log2), nothing))
        if scaled_m is not None:
            failed[r] = T.Or(failed[r], T.abs(scaled_m[r]) > T.float32(SCALED_MAXIMUM_LIMIT))
    return T.cuda.any_sync(T.uint32(FULL_WARP), T.Cast("int32", T.Or(failed[0], failed[1])))


def correction_factors(alpha, m_old, scaled_m, scale_log2, moved=None, weight_log2=0, exact=False):
    """The factors exp(m_old - m_i) of O_i and l_i (Algorithm 1, line 10, without its inverse)."""
    for r in ROWS:
        exponent = (
            (m_old[r] - scaled_m[r]) * scale_log2
            if exact
            else m_old[r] * scale_log2 - T.float32(weight_log2) - scaled_m[r]
        )
        factor = T.exp2(exponent)
        if moved is not None:
            factor = T.Select(moved[r] == 0, T.float32(1.0), factor)
        store(alpha, r, factor)


def scale_rows(O_i, alpha):
    """O_i = diag(alpha) O_i."""
    for i in range(int(O_i.shape[0])):
        store(O_i, i, O_i[i] * alpha[i // 2 % 2])


def scale_sums(l_i, alpha):
    """l_i = alpha l_i."""
    for r in ROWS:
        store(l_i, r, l_i[r] * alpha[r])


def finish_sums(l_i, inverse):
    """l_i over the four lanes that share a row, and its inverse (0 for a row that saw nothing)."""
    for mask in (1, 2):
        for r in ROWS:
            store(l_i, r, l_i[r] + shuffle_xor(l_i[r], mask))
    for r in ROWS:
        nothing = l_i[r] == T.float32(0.0)
        store(inverse, r, T.Select(nothing, T.float32(0.0), T.float32(1.0) / l_i[r]))


def normalise(O_i, l_i, inverse, may_be_empty):
    """O_i = diag(inverse) O_i; a row that saw nothing is 0 even where V holds NaN."""
    for i in range(int(O_i.shape[0])):
        value = O_i[i] * inverse[i // 2 % 2]
        if may_be_empty:
            value = T.Select(l_i[i // 2 % 2] == T.float32(0.0), T.float32(0.0), value)
        store(O_i, i, value)


_CONTAMINATE = """
__device__ __forceinline__ unsigned int fa2tvm_nonfinite_{0}(unsigned int pair, unsigned int acc) {{
  asm("fma.rn.{0}x2 %0, %1, %2, %0;" : "+r"(acc) : "r"(pair), "r"(0u)); return acc;
}}
"""


def nonfinite_rows(words, pairs, dtype, found):
    """Sum 0 * x over each row of a packed fragment: not 0 where one x is NaN or infinite."""
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    for r in ROWS:
        store(found, r, T.uint32(0))
    for i in range(pairs):
        r = i % 2
        value = T.cuda.func_call(
            f"fa2tvm_nonfinite_{kind}",
            words[i],
            found[r],
            source_code=_CONTAMINATE.format(kind),
            return_type="uint32",
        )
        store(found, r, value)


def any_suspect(found, l_i):
    """Whether `nonfinite_rows` found in a row of the warp what its logits do not explain."""
    suspect = []
    for r in ROWS:
        nonfinite = T.bitwise_and(found[r], T.uint32(0x7FFF7FFF)) != T.uint32(0)
        # TVM takes l == l for true.
        suspect.append(T.And(nonfinite, T.Not(T.isnan(l_i[r]))))
    return T.cuda.any_sync(T.uint32(FULL_WARP), T.Cast("int32", T.Or(suspect[0], suspect[1])))
