"""Commands that only look: doctor, explain, schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fa2tvm.cli.options import (
    DeviceOption,
    device_named,
    require_some,
    takes_problems,
)
from fa2tvm.device import Device, cpu_model, detect
from fa2tvm.errors import CompileFailed, Fa2tvmError, UnsupportedProblem
from fa2tvm.lookup import (
    BOUND_TO,
    FAMILIES,
    Found,
    home,
    lookup,
    shipped_root,
    stored_records,
)
from fa2tvm.problem import PASSES, DType, Problem
from fa2tvm.records import versions
from fa2tvm.schedule import SCHEDULES
from fa2tvm.workloads import TAGS, WORKLOADS, parse, tagged

_PROBED = "d64_causal_b1_h2_q64_k64"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(doctor)
    app.command()(takes_problems(explain))
    app.command()(schedules)


def doctor(
    peers: Annotated[
        bool, typer.Option(help="Also try every peer of the benchmark (compiles one).")
    ] = False,
) -> None:
    """Print the devices, the versions, what is tuned for them and what falls back."""
    console = Console()
    console.print(_facts("CPU", _cpu_facts(detect())))
    gpus = _gpus()
    for index, gpu in enumerate(gpus):
        console.print(_facts(f"GPU {index}", _gpu_facts(gpu)))
    if not gpus:
        console.print(_facts("GPU", [("found", "none: calls run on the CPU")]))
    console.print(_facts("Software", _software_facts()))
    for device in dict.fromkeys([detect(), *gpus]):
        console.print(_facts(f"Tuned schedules, {device.slug}", _tuned_facts(device)))
    if peers:
        console.print(_facts("Peers", _peer_facts()))


def _facts(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    return table


def _cpu_facts(device: Device) -> list[tuple[str, str]]:
    import torch

    from fa2tvm import parallel

    cores = f"{device.cores} usable, {torch.get_num_threads()} threads in PyTorch"
    caches = f"L1 {device.l1_bytes >> 10} KiB, L2 {device.l2_bytes >> 10} KiB a core"
    pools = {
        "openmp": "PyTorch's own OpenMP pool",
        "tvm": "TVM's pool, because PyTorch's OpenMP runtime was not found",
        "serial": "none: kernels run on the calling thread",
    }
    return [
        ("model", cpu_model()),
        ("name here", device.slug),
        ("code is made for", f"{device.arch} (level {device.level})"),
        ("vectors", f"{device.vector_bytes} bytes, {device.lanes} float32 lanes"),
        ("cores", cores),
        ("caches", caches),
        ("thread pool", pools[parallel.find().pool]),
    ]


def _gpus() -> list[Device]:
    """The GPUs that PyTorch sees."""
    import torch

    from fa2tvm import cuda_runtime

    return [cuda_runtime.device(index) for index in range(torch.cuda.device_count())]


def _gpu_facts(device: Device) -> list[tuple[str, str]]:
    families = [
        family
        for family in FAMILIES[device.kind]
        if device.arch in BOUND_TO.get(family, (device.arch,))
        and any(known == family for known, _ in SCHEDULES)
    ]
    return [
        ("name here", device.slug),
        ("code is made for", device.arch),
        ("multiprocessors", str(device.cores)),
        ("shared memory", f"{device.shared_bytes >> 10} KiB a block"),
        ("kernel families", ", ".join(families) or "none: this GPU is not supported"),
    ]


def _software_facts() -> list[tuple[str, str]]:
    from fa2tvm import cuda_toolchain, linker

    facts = list(versions().items())
    has_compiler = versions()["apache-tvm"] != "none"
    compiler = "yes" if has_compiler else "no: only packs and cached modules run"
    facts.append(("compiler", compiler))
    found = linker.find()
    missing = "none: programs are compiled in memory, and packs need binutils to be exported"
    facts.append(("linker", found[0] if found else missing))
    cuda = cuda_toolchain.describe_compiler()
    facts.append(("CUDA compiler", cuda or "none: pip install 'fa2tvm[cuda]' or a toolkit"))
    cache = home() / "cache"
    n_modules = sum(1 for _ in cache.glob("*/manifest.json")) if cache.is_dir() else 0
    facts.append(("home", f"{home()} (FA2TVM_HOME)"))
    facts.append(("cache", f"{cache}: {n_modules} compiled modules"))
    facts.append(("shipped data", str(shipped_root())))
    return facts


def _tuned_facts(device: Device) -> list[tuple[str, str]]:
    """What is stored for a device, and how the real problems would be answered."""
    stored = Counter(f"records {origin}" for origin, _ in stored_records(device))
    facts = [(where, str(n)) for where, n in stored.items()]
    dtype: DType = "bfloat16" if device.kind == "cuda" else "float32"
    for pass_ in PASSES:
        tuned: list[str] = []
        others: list[str] = []
        for workload in tagged("tune"):
            try:
                found = lookup(workload.problem(pass_, dtype), device)
            except UnsupportedProblem:
                continue
            (others if found.origin == "default" else tuned).append(workload.name)
        n = len(tuned) + len(others)
        kind = f"{dtype} {pass_}"
        if not n:
            facts.append((kind, "no kernel for this device yet"))
            continue
        which = f": {', '.join(tuned)}" if tuned else ""
        facts.append((f"{kind}, tuned", f"{len(tuned)} of {n} problems{which}"))
        rest = "; `fa2tvm explain --tag tune` lists all, `fa2tvm tune` tunes" if others else ""
        facts.append((f"{kind}, default", f"{len(others)} of {n} problems{rest}"))
    return facts


def _peer_facts() -> list[tuple[str, str]]:
    import torch

    from fa2tvm.bench.measure import Policy, measure
    from fa2tvm.bench.suite import known_peers

    found, once = [], Policy(seconds=0.0)
    kinds: tuple[tuple[str, DType], ...] = (("cpu", "float32"), ("cuda", "bfloat16"))
    for kind, dtype in kinds:
        if kind == "cuda" and not torch.cuda.is_available():
            continue
        probed = parse(_PROBED)
        for row in measure(
            probed, dtype, PASSES, known_peers((), kind), once, "doctor", device=kind
        ):
            found.append((f"{row['peer']}, {kind}, {row['pass']}", row["error"] or "works"))
    return found


def explain(
    problems: list[Problem],
    device: DeviceOption = "native",
    tir: Annotated[bool, typer.Option("--tir", help="Print the TensorIR program.")] = False,
    source: Annotated[
        bool,
        typer.Option(
            "--source", "--llvm", "--cuda", help="Print the LLVM or CUDA code made of it."
        ),
    ] = False,
    asm: Annotated[
        bool, typer.Option("--asm", help="Print the machine code (of a GPU: needs cuobjdump).")
    ] = False,
    code: Annotated[
        bool,
        typer.Option("--code", help="Count instructions, registers, spills, shared memory."),
    ] = False,
) -> None:
    """Print where a problem's schedule comes from, its decisions, footprint and program.

    With the runners-up of its search, and what the cost model predicted beside what was measured.
    """
    console = Console()
    target = device_named(device)
    for problem in require_some(problems):
        found = lookup(problem, target)
        console.print(_facts(problem.name, _schedule_facts(problem, found, target)))
        if tir:
            from fa2tvm import kernels

            typer.echo(kernels.build(problem.variant, found.schedule, target).script())
        if source or asm or code:
            show = _show_cuda if target.kind == "cuda" else _show_llvm
            show(console, problem, found, target, (source, asm, code))


def _schedule_facts(problem: Problem, found: Found, device: Device) -> list[tuple[str, str]]:
    from fa2tvm.viz.explain import tuned_facts

    flops, n_bytes = problem.flops(), problem.bytes()
    footprint = found.schedule.footprint(problem.variant, device)
    decisions = " ".join(f"{name}={value}" for name, value in found.schedule.to_dict().items())
    scratch, of = f"{footprint.scratch_bytes / 1024:.1f} KiB", ""
    if device.kind == "cuda":
        of = f" shared memory of {device.shared_bytes / 1024:.0f}, {footprint.threads} threads"
    task = f"{scratch}{of}, {footprint.accumulator_registers} accumulator registers"
    return [
        ("device", f"{device.slug} ({device.arch})"),
        ("length class", problem.length_class),
        ("family", found.family),
        ("schedule from", found.origin),
        ("decisions", decisions),
        *tuned_facts(found),
        ("one block" if device.kind == "cuda" else "one task", task),
        ("arithmetic", f"{flops / 1e9:.3f} GFLOP"),
        ("least traffic", f"{n_bytes / 2**20:.2f} MiB, {flops / max(n_bytes, 1):.0f} FLOP/byte"),
        *(("passed over", note) for note in found.notes),
    ]


Wanted = tuple[bool, bool, bool]


def _show_llvm(
    console: Console, problem: Problem, found: Found, device: Device, wanted: Wanted
) -> None:
    """LLVM code, assembly, and what it holds."""
    import tvm

    from fa2tvm import kernels
    from fa2tvm.viz.explain import code_facts

    source, asm, code = wanted
    target: Any = tvm.target.Target(device.target())
    with target:
        program = kernels.build(problem.variant, found.schedule, device)
        executable = tvm.compile(program, target=target)
    if source:
        typer.echo(str(executable.mod.inspect_source("ll")))
    if asm or code:
        assembly = str(executable.mod.inspect_source("s"))
        if asm:
            typer.echo(assembly)
        if code:
            console.print(_facts("Machine code", code_facts(assembly)))


def _show_cuda(
    console: Console, problem: Problem, found: Found, device: Device, wanted: Wanted
) -> None:
    """CUDA, SASS, and what it holds."""
    from fa2tvm.viz import explain_cuda

    source, asm, code = wanted
    made = explain_cuda.compile_code(problem.variant, found.schedule, device)
    if source:
        typer.echo(made.source)
    if asm:
        if made.sass is None:
            raise CompileFailed(
                "machine code is read by cuobjdump, which is missing; "
                "run pip install nvidia-cuda-cuobjdump."
            )
        typer.echo(made.sass)
    if code:
        facts = explain_cuda.facts(made, problem.variant, found.schedule, device)
        console.print(_facts("Machine code", facts))


def schedules(
    device: DeviceOption = "native",
    problems: Annotated[
        bool, typer.Option("--problems", help="List the named problems instead.")
    ] = False,
) -> None:
    """List the tuned records that apply to a device, or the named problems."""
    console = Console()
    if problems:
        for tag, purpose in TAGS.items():
            names = [w.name for w in WORKLOADS.values() if tag in w.tags]
            console.print(f"[bold]{tag}[/bold]: {purpose}\n  {', '.join(names)}", soft_wrap=True)
        return
    found = list(stored_records(device_named(device)))
    if not found:
        raise Fa2tvmError("no record is stored for this device; run `fa2tvm tune` to make one.")
    for origin, record in found:
        decisions = " ".join(f"{name}={value}" for name, value in record.decisions.items())
        times = f"{record.us:.1f} us, the default {record.us_default:.1f} us"
        console.print(
            f"[bold]{record.problem.name}[/bold]  {record.ratio:.2f} x the default\n"
            f"  {decisions}\n  {times}, {origin}, {record.date[:10]}",
            soft_wrap=True,
            highlight=False,
        )
