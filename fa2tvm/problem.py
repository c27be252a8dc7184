"""What is asked for: `Variant` (compiled in), `Shape` (run time) and `Problem`, the two."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from fa2tvm.errors import UnsupportedProblem, shown

PassName = Literal["forward", "backward"]
DType = Literal["float32", "float16", "bfloat16"]
Alignment = Literal["bottom_right", "top_left"]

PASSES: tuple[PassName, ...] = ("forward", "backward")
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
ALIGNMENTS: tuple[Alignment, ...] = ("bottom_right", "top_left")
MAX_HEAD_DIM = 512
LENGTH_CLASSES = ("short", "medium", "long")


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedProblem(
            f"{name} is {shown(value)}, but it must be a whole number; pass an int."
        )
    return value


@dataclass(frozen=True)
class Variant:
    """What is compiled into a module; everything else is a run-time argument of it.

    Attributes
    ----------
    pass_
        "forward" (Algorithm 1) or "backward" (Algorithm 2).
    dtype
        Storage type of Q, K, V, O and their gradients; accumulation is float32.
    head_dim_qk, head_dim_v
        Columns of Q and K, and of V and O; 1 to 512.
    causal
        Whether a causal mask is compiled in. Its alignment is a run-time argument
        (`Problem.causal_offset`), because both alignments are one program.

    Raises
    ------
    UnsupportedProblem
        For any value outside these limits.
    """

    pass_: PassName
    dtype: DType
    head_dim_qk: int
    head_dim_v: int
    causal: bool = False

    def __post_init__(self) -> None:
        if self.pass_ not in PASSES:
            raise UnsupportedProblem(
                f"pass_ is {shown(self.pass_)}, but only 'forward' and 'backward' exist; "
                "choose one."
            )
        if self.dtype not in DTYPE_BYTES:
            raise UnsupportedProblem(
                f"dtype is {shown(self.dtype)}, but only float32, float16 and bfloat16 are "
                "supported; convert the inputs."
            )
        for name in ("head_dim_qk", "head_dim_v"):
            value = _whole(name, getattr(self, name))
            if not 1 <= value <= MAX_HEAD_DIM:
                raise UnsupportedProblem(
                    f"{name} is {shown(value)}, but only 1 to {MAX_HEAD_DIM} is supported; "
                    "split the heads differently."
                )
        if not isinstance(self.causal, bool):
            raise UnsupportedProblem(
                f"causal is {shown(self.causal)}, but it must be True or False; choose one."
            )

    @property
    def name(self) -> str:
        """A short identifier: `forward_float32_d64_causal`, `backward_float16_d192_dv128`."""
        parts = [self.pass_, self.dtype, f"d{self.head_dim_qk}"]
        if self.head_dim_v != self.head_dim_qk:
            parts.append(f"dv{self.head_dim_v}")
        if self.causal:
            parts.append("causal")
        return "_".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `Variant(**d)` is the inverse."""
        return asdict(self)


@dataclass(frozen=True)
class Shape:
    """What varies at run time; any size may be 0 except the head counts' ratio.

    Raises
    ------
    UnsupportedProblem
        For a negative size, or heads_q that is no multiple of heads_kv.
    """

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int

    def __post_init__(self) -> None:
        for name in ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv"):
            value = _whole(name, getattr(self, name))
            if value < 0:
                raise UnsupportedProblem(
                    f"{name} is {shown(value)}, but a size is at least 0; check the shapes."
                )
        if self.heads_kv == 0 and self.heads_q == 0:
            return
        if self.heads_kv == 0 or self.heads_q % self.heads_kv:
            raise UnsupportedProblem(
                f"heads_q is {shown(self.heads_q)} with heads_kv {shown(self.heads_kv)}, but "
                "heads_q must be a multiple of heads_kv; repeat or drop key heads."
            )

    @property
    def group(self) -> int:
        """Query heads that share one key head (GQA group size)."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    def to_dict(self) -> dict[str, int]:
        """Plain values for JSON; `Shape(**d)` is the inverse."""
        return asdict(self)


@dataclass(frozen=True)
class Problem:
    """A Variant at a Shape."""

    variant: Variant
    shape: Shape
    alignment: Alignment = "bottom_right"

    def __post_init__(self) -> None:
        for name, kind in (("variant", Variant), ("shape", Shape)):
            if not isinstance(getattr(self, name), kind):
                raise UnsupportedProblem(
                    f"{name} is {shown(getattr(self, name))}, but it must be a {kind.__name__}; "
                    "make one."
                )
        if not isinstance(self.alignment, str) or self.alignment not in ALIGNMENTS:
            raise UnsupportedProblem(
                f"alignment is {shown(self.alignment)}, but only 'bottom_right' and 'top_left' "
                "exist; choose one."
            )

    @property
    def causal_offset(self) -> int:
        """Query row i sees keys j <= i + causal_offset (when the variant is causal)."""
        return self.shape.seq_kv - self.shape.seq_q if self.alignment == "bottom_right" else 0

    @property
    def length_class(self) -> str:
        """The bucket that tuning and lookup use: the longer sequence is up to 512, 2048 or more."""
        longest = max(self.shape.seq_q, self.shape.seq_kv)
        if longest <= 512:
            return "short"
        return "medium" if longest <= 2048 else "long"

    @property
    def name(self) -> str:
        """Variant and sizes, e.g. `forward_float32_d64_causal_b1_h8_q2048_k2048`."""
        s = self.shape
        heads = f"h{s.heads_q}" if s.group == 1 else f"h{s.heads_q}k{s.heads_kv}"
        suffix = "_topleft" if self.variant.causal and self.alignment == "top_left" else ""
        return f"{self.variant.name}_b{s.batch}_{heads}_q{s.seq_q}_k{s.seq_kv}{suffix}"

    def visible_pairs(self) -> int:
        """Number of (query, key) pairs that the mask leaves, per head."""
        s = self.shape
        if not self.variant.causal:
            return s.seq_q * s.seq_kv
        # Row i sees clamp(i + offset + 1, 0, seq_kv) keys: zeros, then a ramp, then full rows.
        first = max(0, -self.causal_offset)
        full_from = min(s.seq_q, max(first, s.seq_kv - 1 - self.causal_offset))
        ramp = full_from - first
        ramp_sum = (
            ramp * (first + self.causal_offset + 1) + ramp * (ramp - 1) // 2 if ramp > 0 else 0
        )
        return ramp_sum + max(0, s.seq_q - max(first, full_from)) * s.seq_kv

    def flops(self) -> int:
        """Useful floating-point operations: 2 or 5 GEMMs over what the mask leaves."""
        s, v = self.shape, self.variant
        per_pair = (
            2 * (v.head_dim_qk + v.head_dim_v)
            if v.pass_ == "forward"
            else 2 * (3 * v.head_dim_qk + 2 * v.head_dim_v)
        )
        return s.batch * s.heads_q * self.visible_pairs() * per_pair

    def bytes(self) -> int:
        """The fewest bytes that cross main memory: inputs are read once, outputs written once."""
        s, v = self.shape, self.variant
        q_like = s.batch * s.heads_q * s.seq_q
        k_like = s.batch * s.heads_kv * s.seq_kv
        element = DTYPE_BYTES[v.dtype]
        tensors = q_like * (v.head_dim_qk + v.head_dim_v) + k_like * (v.head_dim_qk + v.head_dim_v)
        if v.pass_ == "backward":
            tensors = 2 * tensors + q_like * v.head_dim_v
        return tensors * element + q_like * 4

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the inverse."""
        return {
            "variant": self.variant.to_dict(),
            "shape": self.shape.to_dict(),
            "alignment": self.alignment,
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Problem:
        """The inverse of `to_dict`."""
        return cls(Variant(**d["variant"]), Shape(**d["shape"]), d["alignment"])
