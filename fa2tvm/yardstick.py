"""The yardstick: our error against float64 is at most twice that of plain PyTorch.

Tests, tuner and benchmark mean this when they say "right". Compared element by element the rule
would be a lottery: a plain implementation hits many elements exactly by luck. Compared by one
number for the whole tensor it would be blind: the first row of a causal problem is as large as v,
the last is an average of thousands of rows and much smaller, so an error of its own size would pass
(BUGS C07). So every error is first divided by its *unit*: the size that it has where each
intermediate is off by one relative unit. Independent roundings add in quadrature, as in

    O_ic = sum_j P_ij v_jc,  P_ij off by P_ij e_ij,
    unit(O_ic) = |O_ic| + sqrt(sum_j (P_ij e_ij)^2 (v_jc - O_ic)^2),

those that the keys of a row share (of the scale, of LSE, of D) as they are. A sum of d products
is off by |a| |b| + sqrt(d / 3) |a b|: its partial sums are rounded, and grow up to itself where
signs agree. So are those over keys or queries, n for d, of O, LSE and the gradients: a row whose
first key has nearly all the weight carries its O through all the others. Errors in units are of one
distribution over the tensor, so the plain implementation's
worst one is a fair measure for each of ours. Three numbers are compared, each by the factor of two:
the worst element, the worst row (root mean square over the head dim) and the worst column (over the
sequence; it is long, so this one is sharp).

Plain is matmul, softmax, autograd; and, for gradients, Algorithm 2 in five matmuls, which alone
meets what the interface costs: P again from LSE in float32 and D from the stored O. It is measured
on the problem, whose roundings of q it shares with the kernel, and on copies with perturbed inputs
and the worst scale to round, as many as make 1024 rows, because on few or round numbers it may be
exact by luck.

Plain computes in `arithmetic`. A family that computes in float32 whatever it stores, as `cpu` does,
is measured by float32 and forgiven half a unit in the last place of what it stores. One that rounds
P and dS to the storage type, as tensor cores want them, is measured by plain PyTorch in that type.

Rows whose logits are all but zero weigh all keys alike, and a kernel that divides last then rounds
a column of O in all rows as in one: such a column is held to the worst element.

An element whose unit is zero (a row that sees nothing) must be exactly zero, and NaN and infinity
must be where the oracle has them and nowhere else. Nothing is tuned per case. Equal rows round
alike, so the data must be random. docs/yardstick.md says what each part is for.

Source: the factor is that of Dao-AILab/flash-attention's tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from fa2tvm import reference
from fa2tvm.problem import Alignment

NAMES = ("O", "LSE", "dQ", "dK", "dV")
FACTOR = 2.0
ENOUGH_ROWS = 1024
Tensors = dict[str, torch.Tensor]
# ex2.approx and lg2.approx of a GPU are off by up to 2**-22 (PTX ISA), three times half of this.
_GPU_FLOOR = 3 * torch.finfo(torch.float32).eps / 2
# Logits that are held at once: 32 MiB in float64.
_CHUNK_LOGITS = 1 << 22
# A matrix product's longest sum of products in a row: kernels/script.py has the measurement.
_LONGEST_SUM = 192
# Logits below it, some hundred units in the last place of 1, tell no rows apart.
_ALIKE = 2.0**-16
# A product with a shorter side is a dot product in vector lanes, whose sums are more precise than
# those of any matrix product: not what plain means.
_PROPER_SIDE = 32


class Errors(NamedTuple):
    """The worst element, row and column of a result, in units, and where the first one is."""

    element: float
    row: float
    column: float
    at: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs of one call, with the oracle's answer, plain PyTorch's errors and the units.

    Attributes
    ----------
    q, k, v, dO
        BSHD; dO None means forward only.
    dLSE
        [B, H, Sq] or None.
    softmax_scale
        None is 1/sqrt(head_dim).
    arithmetic, storage
        Types that plain PyTorch computes in, and that O is stored in; by default that of q.
    foreign_lse
        The backward was given the oracle's LSE, whose errors are not those of its own S.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dO: torch.Tensor | None = None  # noqa: N815 - the paper's name
    dLSE: torch.Tensor | None = None  # noqa: N815
    softmax_scale: float | None = None
    causal: bool = False
    alignment: Alignment = "bottom_right"
    arithmetic: torch.dtype | None = None
    storage: torch.dtype | None = None
    foreign_lse: bool = False

    @property
    def scale(self) -> float:
        """What softmax_scale means."""
        return reference.resolve_scale(self.softmax_scale, self.q.shape[3])

    @property
    def causal_offset(self) -> int:
        """Query i sees keys j <= i + this."""
        return reference.causal_offset(self.q.shape[1], self.k.shape[1], self.alignment)

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.q.shape[2] // self.k.shape[2] if self.k.shape[2] else 1

    def visible(self) -> torch.Tensor:
        """Which key (column) each query row sees, bool [Sq, Sk]."""
        i, j = torch.arange(self.q.shape[1])[:, None], torch.arange(self.k.shape[1])[None, :]
        return j <= i + self.causal_offset if self.causal else j >= 0 * i

    @cached_property
    def oracle(self) -> Tensors:
        """The answer in float64."""
        how: dict[str, Any] = {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "alignment": self.alignment,
        }
        q, k, v = (_numpy64(x) for x in (self.q, self.k, self.v))
        results: tuple[Any, ...] = reference.attention(q, k, v, **how)
        if self.dO is not None:
            dlse = None if self.dLSE is None else _numpy64(self.dLSE)
            results += reference.attention_backward(q, k, v, _numpy64(self.dO), dlse, **how)
        return {n: torch.from_numpy(x) for n, x in zip(NAMES, results, strict=False)}

    def plain(self, dtype: torch.dtype) -> Tensors:
        """Matmul, softmax and autograd in a type.

        `F.scaled_dot_product_attention` would not do: its CPU flash backend is wrong for some
        legal inputs (BUGS, oracle hazard).
        """
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (self.q, self.k, self.v))
        s, blind = self._logits(q, k, self.scale)
        p = s.softmax(dim=-1).masked_fill(blind, 0)
        out = _product(p, self._heads(v)).transpose(1, 2)
        lse = s.logsumexp(dim=-1).masked_fill(blind[..., 0], -math.inf)
        results = [out, lse]
        if self.dO is not None:
            loss = (out * self.dO.to(dtype)).sum()
            if self.dLSE is not None:
                loss = loss + (lse.masked_fill(blind[..., 0], 0) * self.dLSE.to(dtype)).sum()
            results += torch.autograd.grad(loss, (q, k, v))
        return {n: x.detach() for n, x in zip(NAMES, results, strict=False)}

    def algorithm_2(self, dtype: torch.dtype, out: torch.Tensor) -> Tensors:
        """dQ, dK and dV in a type from O in the storage type and LSE in float32.

        S is in base 2 as in every kernel, so that LSE goes to nats and back. D is the diagonal of
        dO O^T, so that its sums are as precise as those of dP, but from the other end: summed alike
        they cancel exactly for a row that sees one key, which is no virtue of plain arithmetic.
        """
        assert self.dO is not None
        q, k, v = (
            self._heads(self.q.to(dtype)),
            *(self._heads(x.to(dtype)) for x in (self.k, self.v)),
        )
        do, o = (self._heads(x.to(dtype)) for x in (self.dO, out.to(self.storage or self.q.dtype)))
        log2_e = math.log2(math.e)
        s, blind = self._logits(self.q.to(dtype), self.k.to(dtype), self.scale * log2_e)
        lse = (s.float() / log2_e).logsumexp(dim=-1, keepdim=True)
        if self.foreign_lse and dtype == torch.float32:
            lse = self.oracle["LSE"].float()[..., None]
        p = (s.float() - lse * log2_e).exp2().masked_fill(blind, 0).to(dtype)
        delta = _product(do.flip(-1), o.flip(-1).mT).diagonal(dim1=2, dim2=3).float()
        if self.dLSE is not None:
            delta = delta - self.dLSE
        ds = p * (_product(do, v.mT) - delta[..., None].to(dtype))

        def of_keys(x: torch.Tensor) -> torch.Tensor:
            return self._summed(x.float()).to(dtype)

        gradients = (
            self.scale * _product(ds, k),
            of_keys(self.scale * _product(ds.mT, q)),
            of_keys(_product(p.mT, do)),
        )
        return {n: x.transpose(1, 2) for n, x in zip(NAMES[2:], gradients, strict=True)}

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, S, D]; a key head is repeated for its query heads."""
        return x.transpose(1, 2).repeat_interleave(self.q.shape[2] // max(1, x.shape[2]), dim=1)

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, S, D] summed over the query heads of each key head."""
        batch, _, seq, width = x.shape
        return x.reshape(batch, self.k.shape[2], self.group, seq, width).sum(dim=2)

    def _logits(
        self, q: torch.Tensor, k: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """S [B, H, Sq, Sk], and which rows see nothing: those are left unmasked, for autograd."""
        hidden = ~self.visible()
        blind = hidden.all(dim=1, keepdim=True)
        s = _product(self._heads(scale * q), self._heads(k).mT)
        return s.masked_fill(hidden & ~blind, -math.inf), blind.expand(*s.shape[:3], 1)

    @cached_property
    def units(self) -> Tensors:
        """The size of one relative unit of error in each element, float64; see the module."""
        batch, seq_q, heads, _ = self.q.shape
        linear = {n: x.abs() for n, x in self.oracle.items()}
        squares = {n: torch.zeros_like(x) for n, x in linear.items()}
        step = max(1, _CHUNK_LOGITS // max(1, batch * heads * self.k.shape[1]))
        for i in range(0, seq_q, step):
            self._add_units(linear, squares, slice(i, i + step))
        if self.dO is not None:
            queries = self.visible().sum(dim=0)[None, :, None, None] * self.group
            for name in ("dK", "dV"):
                linear[name] *= 1 + self._sums(queries)
        return {n: linear[n] + squares[n].sqrt() for n in linear}

    def _sums(self, count: torch.Tensor) -> torch.Tensor:
        """How far a sum of so many products is off as a share of itself; it is one of float32."""
        share = (count.clamp(max=_LONGEST_SUM) / 3).sqrt()
        float32 = torch.finfo(torch.float32)
        return share * (float32.eps / torch.finfo(self.arithmetic or self.q.dtype).eps)

    def _add_units(self, linear: Tensors, squares: Tensors, rows: slice) -> None:
        """The terms of some query rows, for all batches and heads at once."""
        # Views, [B, H, S, D]; LSE is [B, H, Sq] anyhow.
        of_rows = [
            {n: (x if n == "LSE" else x.transpose(1, 2))[:, :, rows] for n, x in terms.items()}
            for terms in (linear, squares, self.oracle)
        ]
        line, square, oracle = of_rows
        scale, eps = abs(self.scale), torch.finfo(self.arithmetic or self.q.dtype).eps
        q = self._heads(self.q.double())[:, :, rows]
        k, v = self._heads(self.k.double()), self._heads(self.v.double())
        out, lse = oracle["O"], oracle["LSE"][..., None]
        seen = lse > -math.inf
        size = lse.where(seen, 0).abs()
        visible = self.visible()[rows] & seen
        s = self.scale * (q @ k.mT)
        p = (s - lse.where(seen, 0)).where(visible, -math.inf).exp()
        s = s.where(p > 0, 0)
        # P's own rounding, and S's.
        e = 1 + scale * _sum_error(q, k.mT)
        # float32 ends at 2**-126: a smaller P may be lost whole.
        p_error = p * e + visible * (torch.finfo(torch.float32).tiny / eps)
        # The scale's rounding moves all logits of a row together.
        tilt = p * s
        spread = _spread(p_error, v, out)
        square["O"].copy_(spread)
        sums = self._sums(visible.sum(dim=-1, keepdim=True))
        line["O"] *= 1 + sums
        line["O"] += (tilt @ v - out * tilt.sum(dim=-1, keepdim=True)).abs()
        square["LSE"].copy_((p_error**2).sum(dim=-1))
        line["LSE"] += (seen * (1 + sums))[..., 0] + tilt.sum(dim=-1).abs()
        if self.dO is None:
            return
        do = self._heads(self.dO.double())[:, :, rows]
        dp, delta = do @ v.mT, (do * out).sum(dim=-1, keepdim=True)
        # D from O, with O's own error and that of its storage.
        coarser = torch.finfo(self.storage or self.q.dtype).eps / eps - 1
        o_error = line["O"] + spread.sqrt() + coarser * out.abs()
        d_error = (do * o_error).norm(dim=-1, keepdim=True)
        d_error += math.sqrt(v.shape[-1] / 3) * delta.abs()
        if self.dLSE is not None:
            delta = delta - self.dLSE.double()[:, :, rows, None]
        # P again from LSE, whose rounding all keys of a row share.
        p_error = p_error + p * size
        ds_error = p_error * (dp - delta).abs() + p * _sum_error(do, v.mT)
        line["dQ"] *= 1 + sums + size
        line["dQ"] += scale * d_error * (p @ k).abs()
        line["dQ"] += scale * ((tilt * (dp - delta)) @ k).abs()
        square["dQ"].copy_(scale**2 * (ds_error**2 @ k**2))
        of_keys = {
            "dK": scale**2 * ((ds_error + p * d_error) ** 2).mT @ q**2,
            "dV": (p_error**2).mT @ do**2,
        }
        for name, x in of_keys.items():
            squares[name] += self._summed(x).transpose(1, 2)

    @cached_property
    def plain_errors(self) -> dict[str, Errors]:
        """Plain PyTorch's worst errors, in units."""
        dtype = self.arithmetic or self.q.dtype
        worst: dict[str, Errors] = {}
        for case in (self, self._crowd()):
            plain = case.plain(dtype)
            found = [plain, case.algorithm_2(dtype, plain["O"])] if self.dO is not None else [plain]
            if dtype != torch.float32:
                # LSE is float32 for every type.
                found[0]["LSE"] = replace(case, dO=None).plain(torch.float32)["LSE"]
            for name, x in ((n, x) for results in found for n, x in results.items()):
                errors = worst_errors(name, x, case.oracle[name], case.units[name])
                other = worst.get(name, errors)
                worst[name] = Errors(
                    max(errors.element, other.element),
                    max(errors.row, other.row),
                    max(errors.column, other.column),
                    errors.at,
                )
        return worst

    def _crowd(self) -> Case:
        """Perturbed copies of this case, with the scale that float32 rounds worst."""
        batch, seq_q, heads, _ = self.q.shape
        rows = batch * min(seq_q * heads, self.k.shape[1] * self.k.shape[2])
        copies = -(-ENOUGH_ROWS // rows) if rows else 1
        generator = torch.Generator().manual_seed(0)

        def perturbed(x: torch.Tensor | None) -> Any:
            if x is None:
                return None
            many = x.repeat(copies, *[1] * (x.dim() - 1)).double()
            noise = torch.randn(many.shape, generator=generator, dtype=torch.float64)
            return (many * (1 + noise / 16)).to(self.arithmetic or x.dtype)

        below = np.float32(self.scale or self._slight_scale())
        above = np.nextafter(below, np.float32(math.inf))
        return replace(
            self,
            q=perturbed(self.q),
            k=perturbed(self.k),
            v=perturbed(self.v),
            dO=perturbed(self.dO),
            dLSE=perturbed(self.dLSE),
            softmax_scale=(float(below) + float(above)) / 2,
            storage=self.storage or self.q.dtype,
        )

    @property
    def alike(self) -> bool:
        """Whether the logits are too small to tell rows apart, as with a scale of 0."""
        return abs(self.scale) * self._largest_product() < _ALIKE

    def _slight_scale(self) -> float:
        """Logits of up to 1/64. With a scale of 0 all rows would be one, and round as one."""
        return 1 / (64 * (self._largest_product() or 1.0))

    def _largest_product(self) -> float:
        """No q k is larger."""
        if not self.q.numel() or not self.k.numel():
            return 0.0
        largest = (x.double().norm(dim=-1).max().item() for x in (self.q, self.k))
        return float(math.prod(largest))

    def why_wrong(self, ours: Mapping[str, torch.Tensor]) -> str | None:
        """The first of our results that is beyond the yardstick, and how far; None if none is."""
        for name, x in ours.items():
            oracle = self.oracle[name]
            want = torch.float32 if name == "LSE" else self.q.dtype
            if x.shape != oracle.shape:
                return f"{name} has shape {tuple(x.shape)}, not {tuple(oracle.shape)}"
            if x.dtype != want:
                return f"{name} has dtype {x.dtype}, not {want}"
            reason = self._beyond(name, x.detach().cpu()) if x.numel() else None
            if reason:
                return reason
        return None

    def _beyond(self, name: str, ours: torch.Tensor) -> str | None:
        oracle, unit = self.oracle[name], self.units[name]
        finite = oracle.isfinite()
        same = ours.double().eq(oracle) | (ours.isnan() & oracle.isnan())
        for rule, wrong in (
            ("must be as the oracle", ~finite & ~same),
            ("must be finite", finite & ~ours.isfinite()),
            ("must be exactly zero", finite & (unit == 0) & (ours != 0)),
        ):
            if wrong.any():
                at = _index(wrong.int())
                return (
                    f"{name}{list(at)} is {ours[at].item()}, the oracle {oracle[at].item()}: "
                    f"it {rule} ({int(wrong.sum())} such elements of {wrong.numel()})"
                )
        arithmetic = self.arithmetic or self.q.dtype
        forgiven = 0.0 if ours.dtype == torch.float32 else _half_ulp(oracle, ours.dtype)
        floor = 0.0 if arithmetic == torch.float32 else _GPU_FLOOR
        errors = worst_errors(name, ours, oracle, unit, forgiven)
        for what in ("element", "row", "column"):
            got = getattr(errors, what)
            like = "element" if what == "column" and name == "O" and self.alike else what
            allowed = FACTOR * getattr(self.plain_errors[name], like) + floor
            if not got <= allowed:
                return (
                    f"{name}: the worst {what} is off by {got:.3g} units, but plain PyTorch allows "
                    f"{allowed:.3g}; the worst element is {errors.at}"
                )
        return None


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
    rows = error if name == "LSE" else error.square().mean(dim=3).sqrt()
    columns = error.square().mean(dim=2 if name == "LSE" else 1).sqrt()
    worst = [float(y.max()) for y in (error, rows, columns)]
    return Errors(worst[0], worst[1], worst[2], _index(error))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A b by the matrix product of large matrices, whatever the sizes."""

    def padded(x: torch.Tensor) -> torch.Tensor:
        n, m = (max(0, _PROPER_SIDE - side) for side in x.shape[-2:])
        return torch.nn.functional.pad(x, (0, m, 0, n))

    product: torch.Tensor = padded(a) @ padded(b)
    return product[..., : a.shape[-2], : b.shape[-1]]


def _sum_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How far one unit moves each sum of products in A B; see the module."""
    sizes: torch.Tensor = a.norm(dim=-1, keepdim=True) * b.norm(dim=-2, keepdim=True)
    return sizes + math.sqrt(a.shape[-1] / 3) * (a @ b).abs()


def _spread(weights: torch.Tensor, v: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Sum over j of weights_ij^2 (v_jc - mean_ic)^2."""
    w2 = weights**2
    spread = w2 @ v**2 - 2 * mean * (w2 @ v) + mean**2 * w2.sum(dim=-1, keepdim=True)
    return spread.clamp(min=0)


def _half_ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place of x in a type."""
    about = torch.finfo(dtype)
    binade = torch.exp2(x.abs().clamp(min=about.smallest_normal).log2().floor())
    return binade * about.eps / 2


def _index(x: torch.Tensor) -> tuple[int, ...]:
    """Where the largest element is."""
    return tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape))


def _numpy64(x: torch.Tensor) -> Any:
    return x.detach().double().numpy()
