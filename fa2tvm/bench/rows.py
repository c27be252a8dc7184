"""The rows that a benchmark leaves behind: JSON lines and the same as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fa2tvm.errors import CorruptRecord
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.records import write_atomically

Row = dict[str, Any]

# What every row has, in the order of the CSV's columns; `run` follows, flattened.
COLUMNS = (
    "what",
    "workload",
    "peer",
    "family",
    "pass",
    "mode",
    "dtype",
    "head_dim",
    "head_dim_v",
    "causal",
    "batch",
    "seq_q",
    "seq_kv",
    "heads_q",
    "heads_kv",
    "us_p50",
    "us_p20",
    "us_p80",
    "cpu_us_p50",
    "samples",
    "power_w",
    "clock_mhz",
    "tflops",
    "rel_err",
    "rel_err_plain",
    "extra_bytes",
    "output_bytes",
    "origin",
    "schedule",
    "error",
)

# What a row of another script may leave out; `_complete` says what stands there instead.
_OPTIONAL = frozenset(
    {"what", "workload", "cpu_us_p50", "samples", "rel_err_plain", "extra_bytes", "output_bytes"}
    | {"origin", "schedule", "power_w", "clock_mhz"}
)
_RUN = ("device_name", "threads", "peak_gflops", "memory_gbs", "commit", "dirty")


def new_row(what: str, workload: str, peer: str, mode: str, problem: Problem) -> Row:
    """A row with every column; what is not known yet is None."""
    variant, shape = problem.variant, problem.shape
    row: Row = dict.fromkeys(COLUMNS)
    row.update(
        {
            "what": what,
            "workload": workload,
            "peer": peer,
            "pass": variant.pass_,
            "mode": mode,
            "dtype": variant.dtype,
            "head_dim": variant.head_dim_qk,
            "head_dim_v": variant.head_dim_v,
            "causal": variant.causal,
            "batch": shape.batch,
            "seq_q": shape.seq_q,
            "seq_kv": shape.seq_kv,
            "heads_q": shape.heads_q,
            "heads_kv": shape.heads_kv,
        }
    )
    return row


def write_rows(rows: Iterable[Row], path: Path) -> tuple[Path, Path]:
    """Write `path` (.jsonl) and its twin with the suffix .csv; returns both."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    table = path.with_suffix(".csv")
    run_keys = sorted({key for row in rows for key in row["run"]})
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, *(f"run.{key}" for key in run_keys)])
        for row in rows:
            cells = [row[column] for column in COLUMNS] + [row["run"].get(key) for key in run_keys]
            writer.writerow([json.dumps(c) if isinstance(c, dict) else c for c in cells])
    return path, table


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, or of every .jsonl file below a folder, with every column.

    Raises
    ------
    CorruptRecord
        For a missing file or a line that is no row.
    """
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise CorruptRecord(f"{path} holds no rows; run `fa2tvm bench` first.")
    rows = []
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise CorruptRecord(
                    f"{file}:{number} is no JSON ({error}); measure it again."
                ) from None
            needed = [c for c in COLUMNS if c not in _OPTIONAL]
            missing = [c for c in needed if c not in row] if isinstance(row, dict) else ["peer"]
            if missing or "run" not in row:
                raise CorruptRecord(
                    f"{file}:{number} lacks {', '.join(missing) or 'run'}; measure it again."
                )
            rows.append(_complete(row, file))
    return rows


def _complete(row: Row, file: Path) -> Row:
    """A row with every column: `what` is the file's name, `workload` follows from the sizes."""
    if all(column in row for column in COLUMNS):
        return row
    run = row["run"]
    filled: Row = {**dict.fromkeys(COLUMNS), "what": file.stem, **row}
    filled["run"] = {
        **dict.fromkeys(_RUN),
        "device_name": run["device"],
        "commit": run.get("fa2tvm_commit"),
        **run,
    }
    if filled["workload"] is None:
        head_dims = (row["head_dim"], row["head_dim_v"])
        variant = Variant("forward", row["dtype"], *head_dims, bool(row["causal"]))
        shape = Shape(row["batch"], row["heads_q"], row["heads_kv"], row["seq_q"], row["seq_kv"])
        name = Problem(variant, shape).name
        filled["workload"] = name.removeprefix(f"forward_{row['dtype']}_")
    return filled
