"""Checks of a Hopper forward module against float64: shapes, layouts, NaN and infinity, limits."""

from __future__ import annotations

import math

import torch
from hopper_modules import DTYPES, Module, inputs, outputs, reference, relative_error

from fa2tvm.problem import Variant

# (batch, heads_q, heads_kv, seq_q, seq_kv): tails, one row, one key, GQA, more keys than queries
# and the reverse (rows that see nothing), several tiles a thread block, few queries of many heads.
CHECKS = (
    (1, 1, 1, 1, 1),
    (2, 3, 3, 1, 77),
    (1, 2, 1, 63, 65),
    (2, 4, 2, 129, 127),
    (1, 6, 2, 257, 300),
    (1, 2, 2, 300, 130),
    (3, 4, 1, 200, 1),
    (1, 8, 8, 515, 1027),
    (2, 16, 4, 1024, 1024),
    (4, 24, 24, 640, 641),
    (2, 8, 2, 1, 300),
    (3, 12, 4, 5, 333),
    (1, 71, 1, 3, 200),
    (2, 64, 1, 2, 129),
    (1, 32, 8, 100, 700),
)


def check(module: Module) -> tuple[int, list[str]]:
    """Run the module over CHECKS and special inputs: cases, and one line for each failure."""
    failures, cases = [], 0
    variant = module.variant
    for sizes in CHECKS:
        offsets = (sizes[4] - sizes[3], 0) if variant.causal else (0,)
        for offset in dict.fromkeys(offsets):
            # The loudest logits that float16, as the plain implementation stores them, can hold.
            for amplitude, scale in ((1.0, None), (8.0, 0.3), (20.0, 3.0)):
                cases += 1
                q, k, v = inputs(variant, *sizes, amplitude)
                scale = scale or 1 / math.sqrt(variant.head_dim_qk)
                problem = compare(module, q, k, v, scale, offset)
                if problem:
                    failures.append(
                        f"{module.name} {sizes} offset {offset} amplitude {amplitude}: {problem}"
                    )
    for label, q, k, v in odd_layouts(variant):
        cases += 1
        problem = compare(module, q, k, v, 0.125, k.shape[1] - q.shape[1])
        if problem:
            failures.append(f"{module.name} {label}: {problem}")
    for problem in (*check_nan(module), *check_huge(module)):
        failures.append(f"{module.name} {problem}")
    return cases + 14, failures


def compare(module: Module, q, k, v, scale, offset) -> str | None:
    """Why a call is wrong, or None: twice the error of a plain implementation, every row."""
    out, lse, workspace = outputs(module.variant, q)
    module(q, k, v, out, lse, workspace, scale, offset)
    torch.cuda.synchronize()
    want, want_lse = reference(q, k, v, scale, module.variant.causal, offset)
    plain, _ = reference(q, k, v, scale, module.variant.causal, offset, q.dtype)
    if workspace.item():
        return f"counter left at {workspace.item()}"
    if not torch.equal(lse == -math.inf, want_lse == -math.inf):
        return "LSE is -inf in other rows"
    seen = want_lse > -math.inf
    gap = (lse.double() - want_lse)[seen].abs()
    if gap.numel() and not gap.max().item() <= 1e-4 + 3e-6 * want_lse[seen].abs().max().item():
        return f"LSE is off by {gap.max().item():.2e}"
    error = (out.double() - want).abs().amax(-1)
    # Storing O rounds it by eps / 2, in the plain implementation too, but there at another value.
    rounding = torch.finfo(out.dtype).eps / 2 * want.abs().amax(-1)
    allowed = 2 * (plain.double() - want).abs().amax() + 1e-5 + rounding
    if not bool((error <= allowed).all()):
        bad = (~(error <= allowed)).nonzero()
        return f"O is off by {error.max().item():.2e} in {len(bad)} rows, first {bad[0].tolist()}"
    if not relative_error(out, want) <= 2 * relative_error(plain, want) + 1e-6:
        ours, its = relative_error(out, want), relative_error(plain, want)
        return f"relative error {ours:.2e}, plain {its:.2e}"
    return None


def odd_layouts(variant: Variant):
    """Views that must not be copied: BHSD storage, packed slices, steps, expanded, size 1."""
    dtype, d, dv = DTYPES[variant.dtype], variant.head_dim_qk, variant.head_dim_v

    def fresh(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    q, k, v = fresh(2, 4, 150, d), fresh(2, 2, 170, d), fresh(2, 2, 170, dv)
    yield "bhsd", q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    packed = fresh(2, 150, 3, 4, max(d, dv) + 8)
    yield "packed", packed[:, :, 0, :, :d], packed[:, :, 1, :, :d], packed[:, :, 2, :, 8 : 8 + dv]
    yield (
        "every second row",
        fresh(2, 300, 4, d)[:, ::2],
        fresh(2, 340, 2, d)[:, 1::2],
        fresh(2, 170, 2, dv),
    )
    yield (
        "expanded batch",
        fresh(3, 140, 2, d),
        fresh(1, 150, 2, d).expand(3, -1, -1, -1),
        fresh(1, 150, 2, dv).expand(3, -1, -1, -1),
    )
    one = fresh(1, 140, 1, d).as_strided((1, 140, 1, d), (7, d, 3, 1))
    yield "size-1 strides", one, fresh(1, 150, 1, d), fresh(1, 150, 1, dv)


def check_nan(module: Module):
    """What is not finite reaches the rows that see it, in V only its columns, and nothing else."""
    variant = module.variant
    q, k, v = inputs(variant, 1, 2, 2, 200, 200)
    whole_k, whole_v = inputs(variant, 1, 2, 2, 200, 300)[1:]
    whole_k[:, 200:], whole_v[:, 200:] = float("nan"), float("inf")
    problem = compare(module, q, whole_k[:, :200], whole_v[:, :200], 0.1, 0)
    if problem:
        yield f"NaN behind the end: {problem}"
    for key in (3, 90, 133, 190):
        first = key if variant.causal else 0
        seen = torch.zeros(1, 200, 2, variant.head_dim_v, dtype=torch.bool, device="cuda")
        dirty = v.clone()
        dirty[0, key, 1, 5], dirty[0, key - 2, 0] = float("nan"), float("-inf")
        seen[0, first:, 1, 5], seen[0, max(first - 2, 0) :, 0] = True, True
        yield from compare_seen(module, (q, k, dirty), (q, k, v), seen, f"V at key {key}")
        dirty = k.clone()
        dirty[0, key, 1] = float("nan")
        seen = torch.zeros_like(seen)
        seen[0, first:, 1] = True
        yield from compare_seen(module, (q, dirty, v), (q, k, v), seen, f"K at key {key}")
    dirty, seen = q.clone(), torch.zeros_like(seen)
    dirty[0, 70, 1, 3], seen[0, 70, 1] = float("nan"), True
    yield from compare_seen(module, (dirty, k, v), (q, k, v), seen, "Q at query 70")
    dirty = v.clone()
    dirty[:] = float("nan")
    seen = torch.ones_like(seen)
    if variant.causal:
        seen[:, :80] = False
    yield from compare_seen(
        module, (q, k[:, :120], dirty[:, :120]), (q, k[:, :120], v[:, :120]), seen, "V"
    )


def compare_seen(module, tensors, clean, seen, what):
    """Exactly the elements in `seen` are not finite, the others are those of clean inputs."""
    (q, k, v), variant = tensors, module.variant
    out, lse, workspace = outputs(variant, q)
    offset = k.shape[1] - q.shape[1]
    module(q, k, v, out, lse, workspace, 0.1, offset)
    want, _ = reference(*clean, 0.1, variant.causal, offset)
    nonfinite = ~out.isfinite()
    if not torch.equal(nonfinite, seen):
        wrong = (nonfinite != seen).nonzero()
        yield f"{what} not finite: {len(wrong)} elements are wrong, first {wrong[0].tolist()}"
    error = (out.double() - want).abs()[~seen & ~nonfinite]
    if error.numel() and not error.max() <= 4 * torch.finfo(out.dtype).eps * want.abs().max():
        yield f"{what} not finite: the other elements are off by {error.max().item():.1e}"


def check_huge(module: Module):
    """Equal logits of 1e8 and more: O = V to the last bit; the LSE to float32."""
    variant = module.variant
    for constant in (1e4, -100.0, 3e-4):
        q, k, v = (torch.full_like(x, constant) for x in inputs(variant, 1, 2, 1, 150, 333))
        out, lse, workspace = outputs(variant, q)
        scale = 1 / math.sqrt(variant.head_dim_qk)
        module(q, k, v, out, lse, workspace, scale, 333 - 150)
        logit = scale * variant.head_dim_qk * q[0, 0, 0, 0].double().item() ** 2
        seen = torch.arange(184, 334, device="cuda") if variant.causal else torch.tensor(333.0)
        want = logit + seen.double().log().cuda()
        if not bool((out == v[0, 0, 0, 0]).all()):
            yield f"all inputs {constant}: O is not V, off by {(out - v[0, 0, 0, 0]).abs().max()}"
        gap = ((lse - want).abs() / want.abs()).max().item()
        if not gap <= 1e-6:
            yield f"all inputs {constant}: LSE is off by {gap:.1e} of itself"


def check_limits(module: Module):
    """What one GPU must show once: long strides, many heads, repeats, streams and graphs."""
    variant, d = module.variant, module.variant.head_dim_qk
    dtype = DTYPES[variant.dtype]
    scale = 1 / math.sqrt(d)
    if d == variant.head_dim_v:
        rows = 2**31 // (3 * 32 * d) + 300
        packed = torch.randn(1, rows, 3, 32, d, device="cuda", dtype=dtype)
        q, k, v = packed[:, -200:, 0], packed[:, -400:, 1], packed[:, -400:, 2]
        yield "offsets past 2**31 in a packed slice", compare(module, q, k, v, scale, 200)
        del packed, q, k, v
    rows = 2**31 // (128 * variant.head_dim_v) + 130
    q = torch.randn(1, rows, 128, d, device="cuda", dtype=dtype)
    _, k, v = inputs(variant, 1, 1, 128, 1, 64)
    out, lse, workspace = outputs(variant, q)
    offset = rows
    module(q, k, v, out, lse, workspace, scale, offset)
    want, _ = reference(q[:, -130:], k, v, scale, False, 0)
    yield "an output past 2**31", None if relative_error(out[:, -130:], want) < 5e-3 else "wrong"
    del q, k, v, out, lse
    torch.cuda.empty_cache()
    yield (
        "more than 65535 heads",
        compare(module, *inputs(variant, 1100, 64, 32, 17, 33), scale, 16),
    )
    for amplitude in (8.0, 1.0):
        # At 8 the logits spread over hundreds of nats: no maximum can be trusted.
        q, k, v = inputs(variant, 2, 40, 8, 1500, 1500, amplitude)
        results = []
        for _ in range(20):
            out, lse, workspace = outputs(variant, q)
            module(q, k, v, out, lse, workspace, scale, 0)
            results.append((out, lse))
        same = all(torch.equal(o, out) and torch.equal(s, lse) for o, s in results)
        yield f"20 runs bitwise equal, amplitude {amplitude}", None if same else "they differ"
    yield "side stream and graph", check_graph(module, q, k, v, scale, out)


def check_graph(module: Module, q, k, v, scale, want) -> str | None:
    """Run behind a slow copy on a side stream, then capture a graph there and replay it."""
    stream = torch.cuda.Stream()
    late = torch.empty_like(q)
    out, lse, workspace = outputs(module.variant, q)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        module(late, k, v, out, lse, workspace, scale, 0)
        first = out.clone()
    stream.synchronize()
    if not torch.equal(first, want):
        return "the side stream is not obeyed"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module(late, k, v, out, lse, workspace, scale, 0)
    for _ in range(10):
        out.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    return None if torch.equal(out, want) else "replays differ"
