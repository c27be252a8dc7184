"""A fresh Python process, for what depends on what is imported, loaded or forked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import fa2tvm

ROOT = Path(fa2tvm.__file__).parent.parent
# What takes longer hangs, also on a loaded machine.
PATIENCE_S = 300.0


def run_python(
    code: str, timeout_s: float = PATIENCE_S, env: Mapping[str, str | None] | None = None
) -> str:
    """The standard output of a program that must end well; a None in `env` unsets a variable."""
    variables = dict(os.environ)
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), variables.get("PYTHONPATH", "")])
    for name, value in (env or {}).items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=variables,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
