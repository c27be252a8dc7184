"""Packs: exported with the compiler, loaded without it, refused in one sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from python_process import run_python

import fa2tvm
from fa2tvm import cache, manifest, modules
from fa2tvm import compile as compiler
from fa2tvm import device as devices
from fa2tvm import pack as pack_module
from fa2tvm.device import baseline, detect
from fa2tvm.errors import StaleModule, StoreUnavailable, UnsupportedProblem
from fa2tvm.pack import PackEntry, export_pack, load_pack
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.schedule import schedule_class

FORWARD = Variant("forward", "float32", 64, 64)
BACKWARD = Variant("backward", "float32", 64, 64)
PORTABLE = baseline("x86-64-v3")


def entry(variant: Variant, device: Any = None, length_class: str | None = None) -> PackEntry:
    device = device or detect()
    schedule = schedule_class("cpu", variant.pass_).default(variant, device)
    return PackEntry(variant, schedule, device, length_class)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both passes for this CPU, and the forward for any x86-64-v3."""
    entries = [entry(FORWARD), entry(BACKWARD), entry(FORWARD, PORTABLE)]
    return export_pack(entries, tmp_path_factory.mktemp("packs") / "pack")


@pytest.fixture
def copy(pack: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pack, tmp_path / "pack"))


@pytest.fixture(autouse=True)
def _no_packs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "_packs", [])
    modules.forget()


def test_a_pack_that_is_replaced_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J02 (triton #11512): the list of one and a module of the other are never taken together."""
    place = export_pack([entry(FORWARD)], tmp_path / "pack")
    verify, exports = manifest.verified, iter([[entry(BACKWARD)], [entry(FORWARD)]])

    def replace_first(*arguments: Any, **options: Any) -> Any:
        for entries in exports:
            export_pack(entries, place)
            break
        return verify(*arguments, **options)

    monkeypatch.setattr(pack_module.manifest, "verified", replace_first)
    (loaded,) = load_pack(place)
    assert loaded.variant == FORWARD
    assert list(exports) == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems rename twice")
def test_a_new_pack_leaves_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one is there until the new one is; then nothing of it stays."""
    place = export_pack([entry(FORWARD)], tmp_path / "pack")
    monkeypatch.setattr(cache, "discard", lambda _: pytest.fail("the pack was away for a moment"))
    export_pack([entry(BACKWARD)], place)
    assert [module.variant for module in load_pack(place)] == [BACKWARD]
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_new_pack_where_folders_cannot_change_places(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network's file system; where the second rename fails, the old pack comes back."""
    place = export_pack([entry(FORWARD)], tmp_path / "pack")
    monkeypatch.setattr(cache, "_exchange", lambda *_: False)
    rename = Path.rename

    def rename_or_fail(source: Path, target: Path) -> Path:
        if fails and source.name.startswith(".making-") and target == place:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", rename_or_fail)
    if fails:
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            export_pack([entry(BACKWARD)], place)
    else:
        export_pack([entry(BACKWARD)], place)
    wanted = FORWARD if fails else BACKWARD
    assert [module.variant for module in load_pack(place)] == [wanted]
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


WITHOUT_COMPILER = """
import sys
sys.modules["tvm"] = None
sys.modules["matplotlib"] = sys.modules["typer"] = sys.modules["xgboost"] = None
import torch
import fa2tvm
modules = fa2tvm.use_pack({pack!r})
assert len(modules) == 3, modules
q = torch.randn(2, 37, 4, 64, requires_grad=True)
k, v = torch.randn(2, 2, 50, 2, 64).unbind()
out = fa2tvm.attention(q, k, v)
out.sum().backward()
q64 = q.detach().double().requires_grad_()
k64, v64 = (x.double().repeat_interleave(2, 2) for x in (k, v))
p = torch.einsum("bihd,bjhd->bhij", q64, k64).div(8).softmax(-1)
expected = torch.einsum("bhij,bjhd->bihd", p, v64)
expected.sum().backward()
torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
torch.testing.assert_close(q.grad.double(), q64.grad, atol=1e-5, rtol=1e-5)
mapped = open("/proc/self/maps").read()
for library in ("libLLVM", "libtvm_compiler", "libtvm_runtime"):
    assert library not in mapped, library
"""


def test_a_pack_runs_without_the_compiler(pack: Path, tmp_path: Path) -> None:
    """BUGS J07, J10 (FI #1781), J11: torch, numpy and tvm-ffi will do; no tool is on PATH."""
    env = {"FA2TVM_HOME": os.fspath(tmp_path / "empty"), "PATH": os.fspath(tmp_path)}
    run_python(WITHOUT_COMPILER.format(pack=os.fspath(pack)), env=env)


def test_what_the_pack_lacks_is_one_sentence(pack: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['tvm'] = None\n"
        "import torch, fa2tvm\n"
        f"fa2tvm.use_pack({os.fspath(pack)!r})\n"
        "q = torch.randn(1, 4, 1, 40)\n"
        "try:\n    fa2tvm.attention(q, q, q)\n"
        "except fa2tvm.CompileFailed as error:\n    print(error)\n"
    )
    said = run_python(code, env={"FA2TVM_HOME": os.fspath(tmp_path)})
    assert "forward_float32_d40 is not compiled yet" in said


def test_manifest_says_everything(pack: Path) -> None:
    for module in load_pack(pack):
        manifest = module.manifest
        assert manifest["variant"] == module.variant.to_dict()
        assert manifest["schedule"] == module.schedule.to_dict()
        assert manifest["family"] == "cpu"
        assert set(manifest["versions"]) == {"fa2tvm", "apache-tvm", "apache-tvm-ffi"}
        assert set(manifest["features"]) <= devices.cpu_features()
        assert len(manifest["sha256"]) == 64
        assert manifest["target"]["kind"] == "llvm"


def test_modules_of_most_features_come_first(pack: Path) -> None:
    forward = [m for m in load_pack(pack) if m.variant == FORWARD]
    assert [m.manifest["target"]["mcpu"] for m in forward] == [detect().arch, PORTABLE.arch]


def test_a_lesser_cpu_takes_the_portable_module(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUGS J01 (triton #1323): what does not fit is passed over, and named where nothing fits."""
    if set(detect().features) <= set(PORTABLE.features):
        pytest.skip("this CPU has nothing beyond x86-64-v3")
    monkeypatch.setattr(devices, "cpu_features", lambda: frozenset(PORTABLE.features))
    with pytest.raises(StaleModule, match=r"may use .* but this CPU"):
        load_pack(pack)
    only_forward = json.loads((pack / "pack.json").read_text())
    only_forward["modules"] = [r for r in only_forward["modules"] if "forward" in r["module"]]
    copied = pack.parent / "only_forward"
    shutil.copytree(pack, copied)
    (copied / "pack.json").write_text(json.dumps(only_forward))
    assert [m.manifest["target"]["mcpu"] for m in load_pack(copied)] == [PORTABLE.arch]


def test_packs_go_before_lookup(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = fa2tvm.use_pack(pack)
    monkeypatch.setattr(modules, "lookup", None)
    problem = Problem(FORWARD, Shape(1, 1, 1, 4, 4))
    assert fa2tvm.module_for(problem) is used[0]


def test_length_classes(tmp_path: Path) -> None:
    """A module for one length class goes before one for all, and serves no other class."""
    entries = [entry(FORWARD, PORTABLE, "short"), entry(FORWARD)]
    fa2tvm.use_pack(export_pack(entries, tmp_path / "pack"))
    short = fa2tvm.module_for(Problem(FORWARD, Shape(1, 1, 1, 64, 64)))
    long = fa2tvm.module_for(Problem(FORWARD, Shape(1, 1, 1, 64, 9000)))
    assert short.manifest["target"]["mcpu"] == PORTABLE.arch
    assert long.manifest["target"]["mcpu"] == detect().arch


@pytest.mark.parametrize("name", ["../forward", "/etc", "a/b", "..", "."])
def test_a_pack_names_nothing_outside(copy: Path, name: str) -> None:
    listed = json.loads((copy / "pack.json").read_text())
    listed["modules"][0]["module"] = name
    (copy / "pack.json").write_text(json.dumps(listed))
    with pytest.raises(StaleModule, match="directly in its pack"):
        load_pack(copy)


def test_damage_is_named(copy: Path) -> None:
    """BUGS J06 (FI !4490)."""
    listed = json.loads((copy / "pack.json").read_text())["modules"][1]
    manifest = copy / listed["module"] / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(StaleModule, match=r"manifest.json is damaged.*but the pack says"):
        load_pack(copy)
    os.truncate(copy / listed["module"] / "module.so", 100)
    with pytest.raises(StaleModule, match=r"module.so is damaged"):
        load_pack(copy)
    with pytest.raises(StaleModule, match="is no pack"):
        load_pack(copy / listed["module"])
    (copy / "pack.json").write_text('{"format": 77, "modules": []}')
    with pytest.raises(StaleModule, match="format 77"):
        load_pack(copy)


def test_trust(copy: Path) -> None:
    folder = next(p for p in copy.iterdir() if p.is_dir())
    folder.chmod(0o777)
    with pytest.raises(StaleModule, match="trust=True"):
        load_pack(copy)
    assert len(load_pack(copy, trust=True)) == 3


def test_destinations(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(UnsupportedProblem, match="no pack"):
        export_pack([entry(FORWARD)], tmp_path / "full")
    with pytest.raises(UnsupportedProblem, match="no pack"):
        export_pack([entry(FORWARD)], tmp_path / "full" / "thesis.tex")
    with pytest.raises(UnsupportedProblem, match="empty"):
        export_pack([], tmp_path / "none")
    assert not (tmp_path / "none").exists()
    dest = tmp_path / "with space ü" / "pack"
    assert export_pack([entry(FORWARD), entry(BACKWARD)], dest) == dest
    assert export_pack([entry(FORWARD)], dest) == dest
    assert [m.variant for m in load_pack(dest)] == [FORWARD]
    assert [p.name for p in dest.parent.iterdir()] == ["pack"]


def test_a_pack_is_compiled_once(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_compile", None)
    again = export_pack([entry(FORWARD), entry(BACKWARD), entry(FORWARD, PORTABLE)], tmp_path / "p")
    assert (again / "pack.json").read_text() == (pack / "pack.json").read_text()


def test_explicit_schedules_go_before_packs(pack: Path) -> None:
    used = fa2tvm.use_pack(pack)
    problem = Problem(FORWARD, Shape(1, 1, 1, 4, 4))
    q = torch.randn(1, 4, 1, 64)
    with torch.no_grad():
        expected = fa2tvm.attention(q, q, q)
        with fa2tvm.use_schedule(used[0].schedule):
            assert fa2tvm.module_for(problem) is not used[0]
            assert fa2tvm.attention(q, q, q).equal(expected)
    assert fa2tvm.module_for(problem) is used[0]
