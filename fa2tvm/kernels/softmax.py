"""Elementary functions of the online softmax as TensorIR expressions, free of libm calls.

Each takes and returns a float32 TensorIR expression and vectorises at any width.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# Below it 2**x is no normal float32, and the result is exactly 0.
EXP2_UNDERFLOW = -126.0
# 2**r on [-1/2, 1/2], r**5 first: the minimax polynomial of the relative error (9.2e-8, or 1.6e-7
# with float32 roundings) among those that are exactly 1 at 0. Taylor's is off by 2.4e-6.
_EXP2_COEFFICIENTS = (
    1.326472724711154e-3,
    9.671512688150646e-3,
    5.550733743574232e-2,
    2.4022242084635143e-1,
    6.931469775987164e-1,
    1.0,
)
# 1.5 * 2**23 + 127: adding it to a small integer n leaves n + 127 in the low mantissa bits.
_BIASED_BITS = 12583039.0


def exp2(x: Any) -> Any:
    """2**x for x <= 0 and somewhat more (x < 127.5), NaN for NaN, exactly 0 below -126 and at -inf.

    The factor 2**n is built in the exponent bits and multiplied, so that a NaN survives whatever
    its payload is.
    """
    n = T.nearbyint(x)
    r = x - n
    y = T.float32(_EXP2_COEFFICIENTS[0])
    for c in _EXP2_COEFFICIENTS[1:]:
        y = y * r + T.float32(c)
    exponent = T.reinterpret("int32", n + T.float32(_BIASED_BITS))
    y = y * T.reinterpret("float32", T.shift_left(exponent, 23))
    return T.Select(x < T.float32(EXP2_UNDERFLOW), T.float32(0), y)


def log(x: Any) -> Any:
    """Natural logarithm of a positive normal x; NaN for NaN, -inf for 0.

    With x = 2**e * f, f in [sqrt(1/2), sqrt(2)): ln x = e ln 2 + 2 artanh((f - 1) / (f + 1)).
    """
    bits = T.reinterpret("int32", x)
    # 0x3f3504f3 is sqrt(1/2): subtracting it first moves the exponent's step there.
    e = T.shift_right(bits - 0x3F3504F3, 23)
    f = T.reinterpret("float32", bits - T.shift_left(e, 23))
    s = (f - T.float32(1)) / (f + T.float32(1))
    s2 = s * s
    series = T.float32(2 / 9)
    for c in (2 / 7, 2 / 5, 2 / 3, 2.0):
        series = series * s2 + T.float32(c)
    y = T.cast(e, "float32") * T.float32(LN_2) + s * series
    y = T.Select(x == T.float32(0), T.float32(float("-inf")), y)
    # x != x would say it, but TVM simplifies that to false.
    return T.Select(x >= T.float32(0), y, x)
