"""Commands that only look: doctor, explain, schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

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
from fa2tvm.errors import Fa2tvmError
from fa2tvm.lookup import Found, home, lookup, shipped_root, stored_records
from fa2tvm.problem import PASSES, Problem
from fa2tvm.records import versions
from fa2tvm.workloads import TAGS, WORKLOADS, parse, tagged

if TYPE_CHECKING:
    import tvm

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
    """Print the device, the versions, what is tuned for it and what falls back."""
    console = Console()
    device = detect()
    console.print(_facts("Device", _device_facts(device)))
    console.print(_facts("Software", _software_facts()))
    console.print(_facts("Tuned schedules", _tuned_facts(device)))
    if peers:
        console.print(_facts("Peers", _peer_facts()))


def _facts(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    return table


def _device_facts(device: Device) -> list[tuple[str, str]]:
    import torch

    from fa2tvm import parallel

    cores = f"{device.cores} usable, {torch.get_num_threads()} threads in PyTorch"
    caches = f"L1 {device.l1_bytes >> 10} KiB, L2 {device.l2_bytes >> 10} KiB a core"
    pools = {
        "openmp": "PyTorch's own OpenMP pool",
        "tvm": "TVM's pool, because PyTorch's OpenMP runtime was not found",
        "serial": "none: kernels run on the calling thread",
    }
    facts = [
        ("CPU", cpu_model()),
        ("name here", device.slug),
        ("code is made for", f"{device.arch} (level {device.level})"),
        ("vectors", f"{device.vector_bytes} bytes, {device.lanes} float32 lanes"),
        ("cores", cores),
        ("caches", caches),
        ("thread pool", pools[parallel.find().pool]),
    ]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        facts.append(("GPU", f"{gpu}; no kernel family runs on it yet, calls stay on the CPU"))
    else:
        facts.append(("GPU", "none"))
    return facts


def _software_facts() -> list[tuple[str, str]]:
    from fa2tvm.compile import find_linker

    facts = list(versions().items())
    has_compiler = versions()["apache-tvm"] != "none"
    compiler = "yes" if has_compiler else "no: only packs and cached modules run"
    facts.append(("compiler", compiler))
    linker = find_linker()
    missing = "none: programs are compiled in memory, and packs need binutils to be exported"
    facts.append(("linker", linker[0] if linker else missing))
    cache = home() / "cache"
    n_modules = sum(1 for _ in cache.glob("*/manifest.json")) if cache.is_dir() else 0
    facts.append(("home", f"{home()} (FA2TVM_HOME)"))
    facts.append(("cache", f"{cache}: {n_modules} compiled modules"))
    facts.append(("shipped data", str(shipped_root())))
    return facts


def _tuned_facts(device: Device) -> list[tuple[str, str]]:
    """What is stored for this device, and how each real problem would be answered."""
    stored: Counter[str] = Counter()
    for origin, record in stored_records(device):
        stored[f"{origin}: {record.device['slug']}"] += 1
    facts = [(where, f"{n} records") for where, n in stored.items()]
    for pass_ in PASSES:
        tuned: list[str] = []
        falling_back: list[str] = []
        for workload in tagged("tune"):
            found = lookup(workload.problem(pass_, "float32"), device)
            (falling_back if found.origin == "default" else tuned).append(workload.name)
        facts.append((f"{pass_}, tuned", ", ".join(tuned) or "nothing yet: run `fa2tvm tune`"))
        facts.append((f"{pass_}, default", ", ".join(falling_back) or "none"))
    return facts


def _peer_facts() -> list[tuple[str, str]]:
    from fa2tvm.bench.measure import Policy, measure
    from fa2tvm.bench.peers import PEERS

    rows = measure(parse(_PROBED), "float32", PASSES, list(PEERS), Policy(seconds=0.0), "doctor")
    return [(f"{row['peer']}, {row['pass']}", row["error"] or "works") for row in rows]


def explain(
    problems: list[Problem],
    device: DeviceOption = "native",
    tir: Annotated[bool, typer.Option("--tir", help="Print the TensorIR program.")] = False,
    llvm: Annotated[bool, typer.Option("--llvm", help="Print the LLVM code.")] = False,
    asm: Annotated[bool, typer.Option("--asm", help="Print the machine code.")] = False,
    code: Annotated[
        bool, typer.Option("--code", help="Count instructions, registers and spills.")
    ] = False,
) -> None:
    """Print where a problem's schedule comes from, its decisions, footprint and program."""
    console = Console()
    target = device_named(device)
    for problem in require_some(problems):
        found = lookup(problem, target)
        console.print(_facts(problem.name, _schedule_facts(problem, found, target)))
        if tir or llvm or asm or code:
            from fa2tvm import kernels

            program = kernels.build(problem.variant, found.schedule, target)
            if tir:
                typer.echo(program.script())
            for wanted, language in ((llvm, "ll"), (asm, "s")):
                if wanted:
                    typer.echo(_generated(program, target, language))
            if code:
                from fa2tvm.viz.explain import code_facts

                facts = code_facts(_generated(program, target, "s"))
                console.print(_facts("Machine code", facts))


def _schedule_facts(problem: Problem, found: Found, device: Device) -> list[tuple[str, str]]:
    from fa2tvm.viz.explain import runners_up

    flops, n_bytes = problem.flops(), problem.bytes()
    footprint = found.schedule.footprint(problem.variant, device)
    facts = [
        ("device", f"{device.slug} ({device.arch})"),
        ("length class", problem.length_class),
        ("family", found.family),
        ("schedule from", found.origin),
    ]
    if found.record is not None:
        record = found.record
        facts.append(("tuned for", f"{record.problem.name} on {record.device['slug']}"))
        facts.append(("measured", f"{record.ratio:.2f} x the default, {record.date}"))
        facts.append(("evidence", f"tuning_logs/{record.log}"))
        facts += runners_up(found)
    facts += [(name, str(value)) for name, value in found.schedule.to_dict().items()]
    facts += [
        ("scratch of a task", f"{footprint.scratch_bytes / 1024:.1f} KiB"),
        ("accumulators", f"{footprint.accumulator_registers} vector registers"),
        ("arithmetic", f"{flops / 1e9:.3f} GFLOP"),
        ("least traffic", f"{n_bytes / 2**20:.2f} MiB, {flops / max(n_bytes, 1):.0f} FLOP/byte"),
    ]
    return facts + [("passed over", note) for note in found.notes]


def _generated(program: tvm.IRModule, device: Device, language: str) -> str:
    """Generated code of a TensorIR program: "ll" is LLVM, "s" is assembly."""
    import tvm

    target: Any = tvm.target.Target(device.target())
    with target:
        executable = tvm.compile(program, target=target)
    return str(executable.mod.inspect_source(language))


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
    table = Table("origin", "problem", "decisions", "us", "default us", "ratio", "date")
    for origin, record in stored_records(device_named(device)):
        decisions = " ".join(f"{name}={value}" for name, value in record.decisions.items())
        table.add_row(
            origin,
            record.problem.name,
            decisions,
            f"{record.us:.1f}",
            f"{record.us_default:.1f}",
            f"{record.ratio:.2f}",
            record.date[:10],
        )
    if not table.row_count:
        raise Fa2tvmError("no record is stored for this device; run `fa2tvm tune` to make one.")
    console.print(table)
