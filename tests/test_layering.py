"""Imports point down only, and what is light stays light (DESIGN, the layout)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fa2tvm

PACKAGE = Path(fa2tvm.__file__).parent

# From the bottom up; a module may import those of lower layers and of its own line.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("problem", "device", "files"),
    ("schedule", "blocks"),
    ("workloads", "reference", "records"),
    ("yardstick",),
    ("lookup",),
    ("kernels",),
    ("parallel", "linker", "cuda_toolchain", "cuda_runtime"),
    ("trust",),
    ("cache", "manifest"),
    ("compile", "compile_cuda", "cuda_pipeline"),
    ("cuda_launch", "launch", "jit", "pack"),
    ("modules",),
    ("torch_op",),
    ("direct", "cuda_direct"),
    ("api",),
    ("tune", "bench"),
    ("viz",),
    ("demo",),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# What a layer may not import, not even inside a function.
FORBIDDEN = {
    **dict.fromkeys(
        ("errors", "problem", "device", "schedule", "blocks", "workloads", "reference"),
        ("torch", "tvm", "tvm_ffi"),
    ),
    "records": ("torch", "tvm", "tvm_ffi"),
    "lookup": ("torch", "tvm", "tvm_ffi"),
    "kernels": ("torch",),
    "yardstick": ("tvm", "tvm_ffi"),
    "launch": ("tvm",),
    "torch_op": ("tvm",),
    "api": ("tvm",),
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer(path: Path) -> str:
    """The first name below the package: a module or a folder."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, also inside functions, with the line."""
    found = []
    package = (PACKAGE.name, *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = list(package[: len(package) - node.level + 1]) if node.level else []
            base = ".".join(parts + ([node.module] if node.module else []))
            # `from fa2tvm import problem` names the module in the list.
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def top_level_imports(path: Path) -> set[str]:
    """Packages that importing the file imports at once."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = layer(path)
    if own in ("__init__", "__main__"):
        return
    assert own in RANK, f"{own} has no layer yet"
    for name, line in imports(path):
        parts = name.split(".")
        where = f"{path.name}:{line} imports {name}"
        assert parts[0] not in FORBIDDEN.get(own, ()), f"{where}, which {own} must not"
        if parts[0] != PACKAGE.name or len(parts) < 2 or parts[1] not in RANK:
            continue
        assert RANK[parts[1]] <= RANK[own], f"{where}, which lies above {own}"


def test_kernels_know_no_one_above() -> None:
    """The kernel families below know neither; a new family is kernels, a schedule, an entry."""
    for path in (PACKAGE / "kernels").rglob("*.py"):
        for name, line in imports(path):
            assert not name.startswith(("fa2tvm.tune", "fa2tvm.bench", "fa2tvm.workloads")), (
                f"{path.name}:{line} imports {name}"
            )


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_compiler_is_imported_late(path: Path) -> None:
    """What a user's process imports must not need TVM; kernels, the tuner and TVM go together."""
    if layer(path) not in ("kernels", "tune"):
        assert "tvm" not in top_level_imports(path)


def test_import_starts_nothing() -> None:
    """BUGS G06, J14: no compiler, no CUDA, no thread, no process, no file by `import fa2tvm`."""
    script = """
import sys, threading, torch
threads, before = threading.active_count(), set(sys.modules)
import fa2tvm
new = set(sys.modules) - before
assert not {"tvm", "xgboost", "matplotlib", "typer"} & new, sorted(new)
assert not torch.cuda.is_initialized()
assert threading.active_count() == threads
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fa2tvm"
    (package / "kernels").mkdir(parents=True)
    bad = {
        "problem.py": "from fa2tvm.api import attention",
        "kernels/a.py": "def f():\n    import torch",
        "kernels/b.py": "from ..tune import search",
        "launch.py": "import tvm.runtime",
        "novel.py": "",
    }
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", package)
    for name, text in bad.items():
        (package / name).write_text(text)
        with pytest.raises(AssertionError):
            test_imports_point_down(package / name)
    (package / "api.py").write_text("import tvm")
    with pytest.raises(AssertionError):
        test_the_compiler_is_imported_late(package / "api.py")
