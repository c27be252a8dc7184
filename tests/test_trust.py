"""Code is verified before its first instruction runs, and is not taken from where others may write.

The rows named are of BUGS.md, section J.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compiled
import pytest
import torch
from python_process import run_python
from test_pack import FORWARD, entry

from fa2tvm import cache, launch, linker, manifest, trust
from fa2tvm import compile as compiler
from fa2tvm import device as devices
from fa2tvm.errors import StaleModule
from fa2tvm.pack import export_pack, load_pack
from fa2tvm.problem import Variant

# A library that makes a file as soon as it is loaded, before anybody calls anything in it.
TRAP = """
@path = private constant [{length} x i8] c"{path}\\00"
declare i32 @creat(ptr, i32)
define internal void @spring() {{
  %made = call i32 @creat(ptr @path, i32 420)
  ret void
}}
@llvm.global_ctors = appending global [1 x {{ i32, ptr, ptr }}] [
  {{ i32, ptr, ptr }} {{ i32 65535, ptr @spring, ptr null }}]
"""


@pytest.fixture(scope="module")
def built() -> Path:
    return compiled.build(FORWARD)


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """The file that exists once the trap was loaded."""
    return tmp_path / "sprung"


@pytest.fixture
def trap(built: Path, tmp_path: Path, sprung: Path) -> Path:
    """A module folder whose library is the trap; its manifest is right."""
    import tvm

    folder = Path(shutil.copytree(built, tmp_path / "module"))
    source = tmp_path / "trap.ll"
    source.write_text(TRAP.format(length=len(os.fsencode(sprung)) + 1, path=sprung))
    linker.write_object(tvm.runtime.load_module(os.fspath(source)), tmp_path / "trap.o")
    linker.link([tmp_path / "trap.o"], folder / manifest.LIBRARY)
    edit(folder, sha256=manifest.sha256_of(folder / manifest.LIBRARY))
    return folder


def edit(folder: Path, **changes: Any) -> None:
    path = folder / manifest.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (lambda f: edit(f, sha256="0" * 64), r"is damaged: .* says 0000"),
    "older format": (lambda f: edit(f, format=manifest.FORMAT - 1), r"format 0, .* reads 1"),
    "newer format": (lambda f: edit(f, format=manifest.FORMAT + 1), r"format 2, .* reads 1"),
    "machine": (lambda f: edit(f, machine="aarch64"), r"for aarch64, but this machine is x86_64"),
    "CPU": (lambda f: edit(f, features=["avx9000"]), r"may use avx9000, but this CPU \(\w+\)"),
    "older tvm-ffi": (
        lambda f: edit(f, versions={"apache-tvm-ffi": "0.0.9"}),
        r"apache-tvm-ffi 0\.0\.9, but 0\.1\.\S+ is installed",
    ),
    "GPU": (
        lambda f: edit(f, target={"kind": "cuda", "arch": "sm_190"}),
        r"compiled for sm_190, but ",
    ),
    "writable": (lambda f: (f / manifest.LIBRARY).chmod(0o666), r"mode 666.*trust=True"),
    "elsewhere": (lambda f: replace_by_link(f / manifest.LIBRARY), r"is a symbolic link"),
    "no schedule": (lambda f: edit(f, schedule={}), r"describes no program"),
}


def replace_by_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "elsewhere.so"))


@pytest.mark.parametrize("name", WRONG)
def test_refused_before_the_first_instruction(name: str, trap: Path, sprung: Path) -> None:
    """J01 (triton #1323), J06, J11: both values are named, and nothing of the library has run."""
    spoil, message = WRONG[name]
    spoil(trap)
    with pytest.raises(StaleModule, match=message) as refused:
        compiler.load(trap)
    assert not sprung.exists()
    assert "\n" not in str(refused.value)


def test_the_trap_springs_where_nothing_is_wrong(trap: Path, sprung: Path) -> None:
    """The test above would notice an instruction that runs."""
    with pytest.raises(StaleModule, match="holds no forward pass"):
        compiler.load(trap)
    assert sprung.exists()


def test_a_pack_is_verified_before_any_of_it_runs(trap: Path, sprung: Path) -> None:
    pack = trap.parent / "pack"
    pack.mkdir()
    shutil.copytree(trap, pack / "m")
    row = {"module": "m", "length_class": None, "manifest_sha256": "0" * 64}
    (pack / "pack.json").write_text(json.dumps({"format": 1, "modules": [row]}))
    with pytest.raises(StaleModule, match=r"manifest.json is damaged.* pack says 0000"):
        load_pack(pack)
    assert not sprung.exists()


# What is verified is what runs.


def test_what_is_put_in_its_place_after_the_check_does_not_run(
    trap: Path, built: Path, sprung: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J06: another may have the file's place a moment after its checksum was right."""
    folder = Path(shutil.copytree(built, trap.parent / "good"))
    checked = compiler.require_fit

    def swap_after(place: Path, found: dict[str, Any]) -> None:
        checked(place, found)
        (folder / manifest.LIBRARY).write_bytes((trap / manifest.LIBRARY).read_bytes())

    monkeypatch.setattr(compiler, "require_fit", swap_after)
    assert compiler.load(folder).variant == FORWARD
    assert not sprung.exists()
    with pytest.raises(StaleModule, match="is damaged"):
        compiler.load(folder)


def test_a_module_that_runs_survives_a_copy_over_its_file(pack: Path) -> None:
    """J02, J06: `cp` of a newer pack over one in use ended the processes that used it (SIGBUS)."""
    library = module_of(pack) / manifest.LIBRARY
    code = f"""
import torch, fa2tvm
fa2tvm.use_pack({os.fspath(pack)!r})
open({os.fspath(library)!r}, "wb").close()
q = torch.randn(1, 9, 2, 64)
with torch.no_grad():
    out = fa2tvm.attention(q, q, q)
want = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3)
torch.testing.assert_close(out, want.transpose(1, 2))
"""
    run_python(code)


def test_each_load_gets_its_own_library(built: Path) -> None:
    """The loader knows libraries by name, and the numbers of descriptors return."""
    other = compiled.build(Variant("forward", "float32", 8, 8))
    modules = [compiler.load(folder) for folder in (built, other, built)]
    for module in modules:
        q = torch.randn(1, 9, 2, module.variant.head_dim_qk)
        out, _ = launch.forward(module, q, q, q, 1.0, 0)
        want = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, scale=1.0)
        torch.testing.assert_close(out, want.transpose(1, 2))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_code_stays_loaded(built: Path) -> None:
    """J07 (TVM #18316): what threads, or a driver at exit, may still know is not unmapped."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(f"/memfd:{built.name[:60]}")

    before = mapped()
    compiler.load(built)
    gc.collect()
    assert mapped() > before


@pytest.mark.parametrize("kept", [10, 64, 200, 0.1, 0.5])
def test_a_library_that_was_cut_before_its_checksum_was_taken(
    kept: float, built: Path, tmp_path: Path
) -> None:
    """J06: the dynamic loader reads beyond the end of such a file and ends the process (SIGBUS)."""
    folder = Path(shutil.copytree(built, tmp_path / "module"))
    whole = (folder / manifest.LIBRARY).read_bytes()
    cut = whole[: int(kept if kept > 1 else kept * len(whole))]
    (folder / manifest.LIBRARY).write_bytes(cut)
    edit(folder, sha256=manifest.sha256_of(folder / manifest.LIBRARY))
    with pytest.raises(StaleModule, match="holds no forward pass that can be loaded"):
        compiler.load(folder)


def spoil_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def spoil_by_size(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("name", ["pack.json", manifest.MANIFEST, manifest.LIBRARY])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [(spoil_by_a_pipe, "is no file"), (spoil_by_size, "has 1099511627776 bytes")],
)
def test_what_would_wait_or_fill_the_memory_is_refused(
    spoil: Callable[[Path], None], message: str, name: str, pack: Path
) -> None:
    spoil(pack / name if name == "pack.json" else module_of(pack) / name)
    code = f"""
from fa2tvm.errors import StaleModule
from fa2tvm.pack import load_pack
try:
    load_pack({os.fspath(pack)!r})
except StaleModule as error:
    print(error)
"""
    assert message in run_python(code)


# Who may write.


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return export_pack([entry(FORWARD)], tmp_path / "above" / "pack")


def module_of(pack: Path) -> Path:
    return next(path for path in pack.iterdir() if path.is_dir())


OPENED: dict[str, Callable[[Path], Path]] = {
    "pack": lambda pack: pack,
    "list": lambda pack: pack / "pack.json",
    "module": module_of,
    "manifest": lambda pack: module_of(pack) / manifest.MANIFEST,
    "library": lambda pack: module_of(pack) / manifest.LIBRARY,
    "above": lambda pack: pack.parent,
}


@pytest.mark.parametrize("which", OPENED)
def test_what_all_may_write_is_refused_unless_asked_for(which: str, pack: Path) -> None:
    path = OPENED[which](pack)
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(StaleModule, match=rf"{path.name}.* mode \d+.*trust=True"):
        load_pack(pack)
    assert len(load_pack(pack, trust=True)) == 1
    path.chmod(path.stat().st_mode & ~0o002)
    assert len(load_pack(pack)) == 1


def test_a_sticky_folder_above_is_no_danger(pack: Path) -> None:
    """As /tmp: there, only the owner of a file replaces it."""
    pack.parent.chmod(0o1777)
    assert len(load_pack(pack)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_of_other_users_and_groups(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A private group of the user's is as good as the user; a group with others in it is not."""
    os.chown(pack, 1234, -1)
    with pytest.raises(StaleModule, match=r"belongs to user 1234.*trust=True"):
        load_pack(pack)
    os.chown(pack, 0, 1234)
    pack.chmod(0o775)
    with pytest.raises(StaleModule, match=r"mode 775 and group 1234"):
        load_pack(pack)
    monkeypatch.setattr(trust, "_is_own_group", lambda gid: gid == 1234)
    assert len(load_pack(pack)) == 1


@pytest.mark.parametrize("which", ["pack", "library"])
def test_an_access_control_list_counts(
    which: str, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project's folder may give new files to a colleague, behind a group that looks private."""
    monkeypatch.setattr(trust, "_is_own_group", lambda _: True)
    path = OPENED[which](pack)
    entries = [(0x01, 6, -1), (0x02, 6, 1234), (0x04, 4, -1), (0x10, 6, -1), (0x20, 4, -1)]
    encoded = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", encoded)
    except OSError as error:
        pytest.skip(f"this file system has no access control lists ({error})")
    with pytest.raises(StaleModule, match=rf"{path.name} has mode .*access control list.*trust="):
        load_pack(pack)
    assert len(load_pack(pack, trust=True)) == 1


def test_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is in a group: those that it lists, and those whose first group it is."""
    me = SimpleNamespace(pw_name="me", pw_uid=os.geteuid(), pw_gid=7)
    users = [me, SimpleNamespace(pw_name="mallory", pw_uid=4242, pw_gid=8)]
    monkeypatch.setattr(trust.pwd, "getpwall", lambda: users)
    lists = {7: [], 8: [], 9: [me.pw_name], 10: [me.pw_name, "mallory"]}

    def group(gid: int) -> Any:
        return trust.grp.struct_group(("g", "x", gid, lists[gid]))

    monkeypatch.setattr(trust.grp, "getgrgid", group)
    assert [trust._is_own_group(gid) for gid in (0, 7, 8, 9, 10, 11)] == [
        True, True, False, True, False, False
    ]  # fmt: skip


def test_a_pack_through_a_link_is_judged_by_what_it_is(pack: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(pack)
    assert len(load_pack(tmp_path / "link")) == 1
    pack.chmod(0o777)
    with pytest.raises(StaleModule, match="mode 777"):
        load_pack(tmp_path / "link")


def test_a_module_may_not_lie_elsewhere(pack: Path, tmp_path: Path) -> None:
    """Neither by its name nor through a link."""
    module = module_of(pack)
    module.symlink_to(module.rename(tmp_path / "elsewhere"))
    with pytest.raises(StaleModule, match="directly in its pack"):
        load_pack(pack)


@pytest.mark.parametrize("what", ["cache", "above"])
def test_a_cache_that_all_may_write_is_not_used(
    what: str, tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J03 (triton #518): code goes to a folder of this process instead, with one warning."""
    home = tmp_path / "open" / "home"
    (home / "cache").mkdir(parents=True)
    (home / "cache" if what == "cache" else home.parent).chmod(0o777)
    monkeypatch.setenv("FA2TVM_HOME", os.fspath(home))
    monkeypatch.setattr(
        compiler, "_compile", lambda *a: shutil.copy(built / manifest.LIBRARY, a[-1]) and None
    )
    cache._temporary.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"mode 777.* set FA2TVM_HOME to a folder of yours"):
        folder = compiled.build(FORWARD)
    assert not folder.is_relative_to(home)
    assert compiler.load(folder).variant == FORWARD
    cache._temporary.cache_clear()
    shutil.rmtree(folder.parent)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_is_made_here_is_trusted_here(
    umask: int, tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask: nobody else may write what this process makes."""

    def compile_openly(*arguments: Any) -> None:
        shutil.copy(built / manifest.LIBRARY, arguments[-1])
        arguments[-1].chmod(0o777 & ~umask)

    monkeypatch.setattr(compiler, "_compile", compile_openly)
    monkeypatch.setenv("FA2TVM_HOME", os.fspath(tmp_path / "home"))
    before = os.umask(umask)
    cache._umask.cache_clear()
    try:
        folder = compiled.build(FORWARD)
        pack = export_pack([entry(FORWARD)], tmp_path / "pack")
    finally:
        os.umask(before)
        cache._umask.cache_clear()
    assert folder.is_relative_to(tmp_path / "home")
    assert compiler.load(folder).variant == FORWARD
    assert len(load_pack(pack)) == 1


def test_another_program_in_a_module_s_place_is_built_again(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """J01 (triton #1323), J02: whole and of this machine, and yet of another mask."""
    monkeypatch.setenv("FA2TVM_HOME", os.fspath(tmp_path))
    shutil.copytree(built, tmp_path / "cache" / built.name)
    edit(tmp_path / "cache" / built.name, variant={**FORWARD.to_dict(), "causal": True})
    compiles: list[Any] = []

    def compile_again(*arguments: Any) -> None:
        compiles.append(arguments)
        shutil.copy(built / manifest.LIBRARY, arguments[-1])

    monkeypatch.setattr(compiler, "_compile", compile_again)
    assert compiler.load(compiled.build(FORWARD)).variant == FORWARD
    assert len(compiles) == 1
    assert "another program" in caplog.text


# Places.


def test_packs_in_odd_places(pack: Path, tmp_path: Path) -> None:
    """J03 (triton #518), J04, J12: read-only, a link, spaces and non-ASCII, no home."""
    odd = tmp_path / "é 空" / "ü pack"
    shutil.copytree(pack, odd)
    for path in (*odd.rglob("*"), odd):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (tmp_path / "link").symlink_to(odd)
    code = f"""
import ctypes, os, sys
sys.modules["tvm"] = None
import torch, fa2tvm, fa2tvm.api, tvm_ffi
# Without its capabilities root, too, writes to nothing that is read-only (capset(2), version 3).
assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
for path in {[os.fspath(odd), os.fspath(tmp_path / "link")]!r}:
    (module,) = fa2tvm.use_pack(path)
q = torch.randn(1, 9, 2, 64)
with torch.no_grad():
    assert fa2tvm.attention(q, q, q).isfinite().all()
assert not os.access({os.fspath(odd)!r}, os.W_OK)
"""
    run_python(code, env={"HOME": None, "FA2TVM_HOME": None})


def test_the_features_of_this_cpu_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that reports nothing runs nothing that asks for something."""
    monkeypatch.setattr(devices, "cpu_features", frozenset)
    with pytest.raises(StaleModule, match="but this CPU"):
        manifest.require_features(Path("x"), {"features": ["avx"], "target": {"mcpu": "x"}})
