"""The CPU backward beyond the contract: geometry, splits, subsets, loud rows, NaN in its place."""

from __future__ import annotations

import math

import pytest
import torch
from calls import assert_same_bits, backward, forward, module, random_case, variant_of
from yardstick import Case

from fa2tvm.blocks import query_blocks
from fa2tvm.device import baseline, detect
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.schedule import CpuBackward

DEVICES = (detect(), baseline("x86-64-v3"), baseline("x86-64-v4"))


@pytest.mark.parametrize("offset", [-300, -65, -1, 0, 1, 63, 64, 500])
def test_first_query_block_is_that_of_blocks(offset: int) -> None:
    tvm = pytest.importorskip("tvm")
    from fa2tvm.kernels import cpu_bwd_blocks

    variant = Variant("backward", "float32", 64, 64, causal=True)
    schedule = CpuBackward.default(variant, detect())
    sizes = cpu_bwd_blocks.Sizes.of(variant, schedule)
    int64 = tvm.tirx.IntImm
    for seq_q in (1, 63, 64, 65, 200):
        for j in range(4):
            j0 = int64("int64", j * schedule.block_kv)
            first = cpu_bwd_blocks.first_query_block(
                sizes, j0, int64("int64", seq_q), int64("int64", offset)
            )
            want = query_blocks(
                j, schedule.block_q, schedule.block_kv, seq_q, 4 * schedule.block_kv, True, offset
            )
            assert int(tvm.sym.Analyzer().simplify(first)) == want.start


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.slug)
def test_default_tiles_cover_the_head_dims(device: object) -> None:
    for d in (1, 3, 8, 24, 40, 56, 80, 96, 112, 160, 192, 208, 256, 512):
        variant = Variant("backward", "float32", d, d)
        schedule = CpuBackward.default(variant, device)  # type: ignore[arg-type]
        padded = schedule.padded(d)
        assert padded >= d
        assert padded % (schedule.tile_vectors(d) * schedule.lanes) == 0


def test_splits_feed_all_threads_and_no_more() -> None:
    variant = Variant("backward", "float32", 64, 64)
    schedule = CpuBackward.default(variant, detect())
    assert schedule.splits(Problem(variant, Shape(1, 8, 8, 2048, 2048)), 2) == 1
    assert schedule.splits(Problem(variant, Shape(1, 1, 1, 2048, 2048)), 2) == 2
    assert schedule.splits(Problem(variant, Shape(1, 1, 1, 2048, 64)), 2) == 1
    assert schedule.splits(Problem(variant, Shape(1, 3, 3, 4096, 4096)), 2) == 2
    assert schedule.splits(Problem(variant, Shape(0, 3, 3, 0, 0)), 2) == 1


def _call(case: Case, splits: int) -> dict[str, torch.Tensor]:
    """The kernel itself with a given number of splits."""
    variant = variant_of(case, "backward")
    loaded = module(variant)
    shape = Shape(
        case.q.shape[0], case.q.shape[2], case.k.shape[2], case.q.shape[1], case.k.shape[1]
    )
    floats = loaded.schedule.workspace_floats(Problem(variant, shape), splits)  # type: ignore[attr-defined]
    results = forward(case)
    out, lse = results["O"], results["LSE"]
    gradients = [torch.full_like(x, math.nan) for x in (case.q, case.k, case.v)]
    workspace = torch.full((floats,), math.nan)
    scalars = (case.scale, case.causal_offset, 0, 1, 1, 1, splits)
    loaded.function(case.q, case.k, case.v, out, lse, case.dO, lse, *gradients, workspace, *scalars)
    return dict(zip(("dQ", "dK", "dV"), gradients, strict=True))


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_every_split_is_right_and_repeatable(
    splits: int, causal: bool, generator: torch.Generator
) -> None:
    case = random_case(generator, torch.float32, seq_q=300, heads=4, heads_kv=2, causal=causal)
    first = _call(case, splits)
    case.check(first)
    for _ in range(5):
        assert_same_bits(_call(case, splits), first)


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1)])
def test_a_subset_is_the_whole_runs(needs: tuple[int, ...], generator: torch.Generator) -> None:
    case = random_case(generator, torch.float32, seq_q=150, heads=4, heads_kv=2, causal=True)
    results = forward(case)
    whole = backward(case, results)
    wanted = {n: x for n, x, need in zip(whole, whole.values(), needs, strict=True) if need}
    assert_same_bits(backward(case, results, needs=tuple(map(bool, needs))), wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [100.0, 1e4])
def test_loud_rows_sum_to_one(size: float, causal: bool) -> None:
    """BUGS A10: all logits equal and huge, which LSE in float32 cannot hold."""
    x = torch.full((1, 50, 1, 64), size)
    case = Case(x, x, x, dO=torch.ones_like(x), causal=causal)
    gradients = backward(case, forward(case))
    seen = torch.arange(1, 51) if causal else torch.full((50,), 50)
    share = (case.visible() / seen[:, None]).sum(0)
    torch.testing.assert_close(gradients["dV"][0, :, 0, 0], share, rtol=1e-5, atol=0)
    for name in ("dQ", "dK"):
        assert gradients[name].abs().max() <= 1e-5 * size * size


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "dO"])
@pytest.mark.parametrize("seq", [64, 200])
def test_nan_stays_where_it_is_seen(
    seq: int, where: str, bad: float, generator: torch.Generator
) -> None:
    case = random_case(generator, torch.float32, seq_q=seq, heads=2, causal=True)
    getattr(case, where)[0, seq // 2 + 3, 1, 5] = bad
    gradients = backward(case, forward(case))
    for name, x in gradients.items():
        assert torch.equal(x.isfinite(), case.oracle[name].isfinite()), name


def test_blind_rows_take_no_part_whatever_they_hold(generator: torch.Generator) -> None:
    """BUGS A05: causal with more queries than keys."""
    case = random_case(generator, torch.float32, seq_q=70, seq_kv=5, d=8, causal=True)
    clean = backward(case, forward(case))
    case.dO[:, :65] = math.nan  # type: ignore[index]
    gradients = backward(case, forward(case))
    assert_same_bits(gradients, clean)
    assert (gradients["dQ"][:, :65] == 0).all()
