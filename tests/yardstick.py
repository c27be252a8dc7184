"""The yardstick: our error against float64 is at most twice that of plain PyTorch in our dtype.

Compared element by element, the rule would be a lottery: a plain implementation hits many elements
exactly by luck. Compared by one number for the whole tensor, it would be blind: the first row of a
causal problem is as large as v, the last is an average of thousands of rows and much smaller, so
an error of its own size would pass (BUGS C07). So every error is first divided by its *unit*: the
size that the error of that element has if each float32 (or stored) intermediate is off by one
relative unit. Sums of independent roundings add in quadrature, as in

    O_ic = sum_j P_ij v_jc,  P_ij off by P_ij e_ij,
    e_ij = 1 + |scale| |q_i| |k_j| + sqrt(d / 3) |S_ij|  (S_ij: d partial sums)
    unit(O_ic) = |O_ic| + sqrt(sum_j (P_ij e_ij)^2 (v_jc - O_ic)^2).

with the terms that all keys of a row share added as they are. (So the data must be random: the
roundings of equal rows are not independent.) Errors in units are of one distribution over the
tensor, so the plain implementation's worst one is a fair measure for each of ours. Three numbers
are compared, each by the factor of two: the worst element, the worst row (root mean square over
the head dim) and the worst column (over the sequence; it is long, so this one is sharp). Where a
problem has few rows the plain implementation may be exact by luck; it is measured on copies with
perturbed inputs as well. On top, eps(dtype) / 2 of the element is forgiven, the rounding of the
stored result, and three times eps(float32) / 2 units: FlashAttention recomputes P from LSE where
plain PyTorch keeps it, and to and from nats these are three roundings more. It also takes D from
the stored O: what eps(dtype) of O does to dQ and dK by way of D is forgiven there. LSE is float32
for every dtype, and so is the plain one. Nothing is tuned per case.

An element whose unit is zero (a row that sees nothing) must be exactly zero, and NaN and infinity
must be where the oracle has them and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fa2tvm import reference
from fa2tvm.problem import Alignment

NAMES = ("O", "LSE", "dQ", "dK", "dV")
FACTOR = 2.0
Tensors = dict[str, torch.Tensor]
_INPUTS = ("q", "k", "v", "dO", "dLSE")
_ENOUGH_ROWS = 256


class Errors(NamedTuple):
    """The worst element, row and column of a result, in units, and where the first one is."""

    element: float
    row: float
    column: float
    at: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs of one call, with the oracle's, the plain implementation's answer and the units.

    q, k, v, dO are BSHD; dO None means forward only; dLSE [B, H, Sq] may be None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dO: torch.Tensor | None = None  # noqa: N815 - the paper's name
    dLSE: torch.Tensor | None = None  # noqa: N815
    softmax_scale: float | None = None
    causal: bool = False
    alignment: Alignment = "bottom_right"

    @property
    def scale(self) -> float:
        return reference.resolve_scale(self.softmax_scale, self.q.shape[3])

    @property
    def causal_offset(self) -> int:
        return reference.causal_offset(self.q.shape[1], self.k.shape[1], self.alignment)

    @cached_property
    def oracle(self) -> Tensors:
        """The answer in float64."""
        how: dict[str, Any] = {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "alignment": self.alignment,
        }
        q, k, v = (numpy64(x) for x in (self.q, self.k, self.v))
        results = reference.attention(q, k, v, **how)
        if self.dO is not None:
            dlse = None if self.dLSE is None else numpy64(self.dLSE)
            results += reference.attention_backward(q, k, v, numpy64(self.dO), dlse, **how)
        return {n: torch.from_numpy(x) for n, x in zip(NAMES, results, strict=False)}

    @cached_property
    def plain(self) -> Tensors:
        """The same by matmul, softmax and autograd in the dtype of the inputs.

        `F.scaled_dot_product_attention` would not do: its CPU flash backend is wrong for some
        legal inputs (BUGS, oracle hazard).
        """
        result = self._plain(self.q.dtype)
        if self.q.dtype != torch.float32:
            result["LSE"] = self._plain(torch.float32)["LSE"]
        return result

    def _plain(self, dtype: torch.dtype) -> Tensors:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (self.q, self.k, self.v))
        group = q.shape[2] // k.shape[2] if k.shape[2] else 1
        q_pad, k_pad, v_pad = (_padded(x).permute(0, 2, 1, 3) for x in (q, k, v))
        k_pad, v_pad = (x.repeat_interleave(group, dim=1) for x in (k_pad, v_pad))
        s = self.scale * (q_pad @ k_pad.transpose(2, 3))
        hidden = ~self.visible()
        blind = hidden.all(dim=1)[:, None]
        s_masked = s.masked_fill(hidden & ~blind, -math.inf)
        p = s_masked.softmax(dim=-1).masked_fill(blind, 0)
        out = (p @ v_pad).permute(0, 2, 1, 3)[..., : v.shape[3]]
        lse = s_masked.logsumexp(dim=-1).masked_fill(blind[:, 0], -math.inf)
        results = [out, lse]
        if self.dO is not None:
            loss = (out * self.dO.to(dtype)).sum()
            if self.dLSE is not None:
                seen = lse.masked_fill(blind[:, 0], 0)
                loss = loss + (seen * self.dLSE.to(dtype)).sum()
            results += torch.autograd.grad(loss, (q, k, v))
        return {n: x.detach() for n, x in zip(NAMES, results, strict=False)}

    def visible(self) -> torch.Tensor:
        """Which key (column) each query row sees, bool [Sq, Sk]."""
        seq_q, seq_kv = self.q.shape[1], self.k.shape[1]
        if not self.causal:
            return torch.ones(seq_q, seq_kv, dtype=torch.bool)
        i, j = torch.arange(seq_q)[:, None], torch.arange(seq_kv)[None, :]
        return j <= i + self.causal_offset

    @property
    def units(self) -> Tensors:
        """The size of one relative unit of error in each element, float64; see the module."""
        return self._units[0]

    @cached_property
    def _units(self) -> tuple[Tensors, Tensors]:
        """The units, and how far one unit of the stored O moves dQ and dK by way of D."""
        result = {n: x.abs() for n, x in self.oracle.items()}
        group = self.q.shape[2] // self.k.shape[2] if self.k.shape[2] else 1
        squares = {n: torch.zeros_like(x) for n, x in result.items()}
        squares |= {
            f"{n} by D": torch.zeros_like(x) for n, x in result.items() if n in ("dQ", "dK")
        }
        # As many rows at a time as keep a matrix of logits below 32 MiB.
        step = max(1, (1 << 22) // max(1, self.k.shape[1]))
        for b in range(self.q.shape[0]):
            for h in range(self.q.shape[2]):
                for i in range(0, self.q.shape[1], step):
                    self._add_units(result, squares, b, slice(i, i + step), h, h // group)
        units = {n: result[n] + squares[n].sqrt() for n in self.oracle}
        return units, {n: squares[f"{n} by D"].sqrt() for n in ("dQ", "dK") if n in units}

    def _add_units(
        self, linear: Tensors, squares: Tensors, b: int, rows: slice, h: int, hk: int
    ) -> None:
        q, k, v = (x.double() for x in (self.q[b, rows, h], self.k[b, :, hk], self.v[b, :, hk]))
        out, lse = self.oracle["O"][b, rows, h], self.oracle["LSE"][b, h, rows]
        seen = lse > -math.inf
        s = (self.scale * (q @ k.T)).masked_fill(~self.visible()[rows], -math.inf)
        p = (s - lse.where(seen, 0)[:, None]).exp() * seen[:, None]
        e = 1 + abs(self.scale) * q.norm(dim=1)[:, None] * k.norm(dim=1)[None, :]
        # A logit's partial sums are rounded too: d of them, up to the logit where signs agree.
        e = e + math.sqrt(q.shape[1] / 3) * s.where(p > 0, 0).abs()
        pe2 = (p * e) ** 2
        spread = pe2 @ v**2 - 2 * out * (pe2 @ v) + out**2 * pe2.sum(dim=1, keepdim=True)
        squares["O"][b, rows, h] = spread.clamp(min=0)
        # The scale's own rounding moves all logits of a row together.
        tilt = p * s.where(p > 0, 0)
        linear["O"][b, rows, h] += (tilt @ v - out * tilt.sum(dim=1, keepdim=True)).abs()
        linear["LSE"][b, h, rows] += seen
        squares["LSE"][b, h, rows] = pe2.sum(dim=1)
        if self.dO is None:
            return
        # Backward recomputes P from LSE, whose own rounding all keys of a row share.
        log_size = lse.where(seen, 0).abs()[:, None]
        do = self.dO[b, rows, h].double()
        # D is the row sum of dO * O, with O's own error.
        o_unit = linear["O"][b, rows, h] + squares["O"][b, rows, h].sqrt()
        delta_error = (do * o_unit).norm(dim=1)[:, None]
        stored = (do * out).norm(dim=1)[:, None]
        scale2 = self.scale**2
        squares["dQ by D"][b, rows, h] = scale2 * (stored * (p @ k)) ** 2
        squares["dK by D"][b, :, hk] += scale2 * ((p * stored) ** 2).T @ q**2
        dp = do @ v.T
        delta = (do * out).sum(dim=1, keepdim=True)
        if self.dLSE is not None:
            delta = delta - self.dLSE[b, h, rows].double()[:, None]
        ds = p * ((e + log_size) * (dp - delta).abs() + do.norm(dim=1)[:, None] * v.norm(dim=1))
        linear["dQ"][b, rows, h] *= 1 + log_size
        linear["dQ"][b, rows, h] += abs(self.scale) * delta_error * (p @ k).abs()
        linear["dQ"][b, rows, h] += abs(self.scale) * ((tilt * (dp - delta)) @ k).abs()
        squares["dQ"][b, rows, h] = scale2 * (ds**2 @ k**2)
        squares["dK"][b, :, hk] += scale2 * ((ds + p * delta_error) ** 2).T @ q**2
        squares["dV"][b, :, hk] += ((p * (e + log_size)) ** 2).T @ do**2

    @cached_property
    def plain_errors(self) -> dict[str, Errors]:
        """The plain implementation's worst errors, in units."""
        crowd = self._crowd()
        return {
            name: worst_errors(name, x, crowd.oracle[name], crowd.units[name])
            for name, x in crowd.plain.items()
        }

    def _crowd(self) -> Case:
        """This case, and as many perturbed copies behind it as make 256 rows of Q and of K."""
        batch, seq_q, heads, _ = self.q.shape
        rows = batch * min(seq_q * heads, self.k.shape[1] * self.k.shape[2])
        if not 0 < rows < _ENOUGH_ROWS:
            return self
        copies = -(-_ENOUGH_ROWS // rows)
        generator = torch.Generator().manual_seed(0)

        def crowded(x: torch.Tensor) -> torch.Tensor:
            many = x.repeat(copies, 1, 1, 1) if x.dim() == 4 else x.repeat(copies, 1, 1)
            noise = torch.randn(many.shape, generator=generator) / 16
            noise[:batch] = 0
            return (many * (1 + noise)).to(x.dtype)

        tensors = {n: crowded(x) for n, x in vars(self).items() if n in _INPUTS and x is not None}
        return replace(self, **tensors)

    def check(self, ours: Mapping[str, torch.Tensor]) -> None:
        """Hold each of our results to the yardstick."""
        for name, x in ours.items():
            oracle = self.oracle[name]
            assert x.shape == oracle.shape, f"{name} has shape {x.shape}, not {oracle.shape}"
            want = torch.float32 if name == "LSE" else self.q.dtype
            assert x.dtype == want, f"{name} has dtype {x.dtype}, not {want}"
            if x.numel():
                by_d = self._units[1].get(name, torch.zeros(()))
                forgiven = torch.finfo(x.dtype).eps * by_d
                errors = self.plain_errors[name]
                assert_within_yardstick(name, x, errors, oracle, self.units[name], forgiven)


def assert_within_yardstick(
    name: str,
    ours: torch.Tensor,
    plain_errors: Errors,
    oracle: torch.Tensor,
    unit: torch.Tensor,
    forgiven: torch.Tensor,
) -> None:
    """Raise AssertionError where `ours` is worse than twice the plain, as this module means it."""
    finite = oracle.isfinite()
    same = ours.double().eq(oracle) | (ours.isnan() & oracle.isnan())
    _refuse(name, "must be as the oracle", ~finite & ~same, ours, oracle)
    _refuse(name, "must be finite", finite & ~ours.isfinite(), ours, oracle)
    _refuse(name, "must be exactly zero", finite & (unit == 0) & (ours != 0), ours, oracle)
    # Half a unit in the last place, which is half the smallest subnormal near zero.
    dtype = torch.finfo(ours.dtype)
    rounding = oracle.abs().clamp(min=dtype.smallest_normal) * dtype.eps / 2
    errors = worst_errors(name, ours, oracle, unit, rounding + forgiven)
    floor = 3 * torch.finfo(torch.float32).eps / 2
    for what in ("element", "row", "column"):
        got, allowed = getattr(errors, what), FACTOR * getattr(plain_errors, what) + floor
        assert got <= allowed, (
            f"{name}: the worst {what} is off by {got:.3g} units, but plain PyTorch allows "
            f"{allowed:.3g}; the worst element is {errors.at}"
        )


def worst_errors(
    name: str,
    x: torch.Tensor,
    oracle: torch.Tensor,
    unit: torch.Tensor,
    forgiven: torch.Tensor | float = 0.0,
) -> Errors:
    """The worst errors of x; rows run along the last dim, columns along the sequence."""
    measured = oracle.isfinite() & (unit > 0) & x.isfinite()
    error = ((x.double() - oracle).abs() - forgiven).clamp(min=0) / unit
    error = error.where(measured, 0)
    if not error.numel():
        return Errors(0, 0, 0, ())
    # LSE is [B, H, Sq], so that its row is the element itself.
    sequence, row = (2, None) if name == "LSE" else (1, 3)
    element, *means = (_worst(error, dim).max().item() for dim in (None, row, sequence))
    return Errors(element, *means, at=_index(error))


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Zeros behind a short head dim.

    A matmul of fewer columns is a dot product in vector lanes, whose sums are more precise than
    those of any matmul proper: not what plain means.
    """
    return torch.nn.functional.pad(x, (0, max(0, 16 - x.shape[3])))


def _worst(error: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Root mean square along a dim, or the elements themselves."""
    return error if dim is None else error.square().mean(dim=dim).sqrt()


def _refuse(
    name: str, rule: str, wrong: torch.Tensor, ours: torch.Tensor, oracle: torch.Tensor
) -> None:
    if wrong.any():
        where = _index(wrong.int())
        raise AssertionError(
            f"{name}{list(where)} is {ours[where].item()}, the oracle {oracle[where].item()}: "
            f"it {rule} ({int(wrong.sum())} such elements of {wrong.numel()})"
        )


def _index(x: torch.Tensor) -> tuple[int, ...]:
    """Where the largest element is."""
    return tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape))


def numpy64(x: torch.Tensor) -> Any:
    """A float64 numpy copy of a tensor of any dtype."""
    return x.detach().double().numpy()
