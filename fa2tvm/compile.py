"""TensorIR to module: a content-addressed cache of compiled programs, packs of them, and loading.

A module is a folder with `module.so` and `manifest.json`. Only `build` needs the TVM compiler.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fa2tvm import device as devices
from fa2tvm import parallel
from fa2tvm.device import Device
from fa2tvm.errors import CompileFailed, Fa2tvmError, StaleModule, UnsupportedProblem
from fa2tvm.lookup import home
from fa2tvm.problem import Variant
from fa2tvm.records import program_version, versions
from fa2tvm.schedule import Schedule, schedule_from_dict

# Raised whenever the manifest or the way that launch.py calls a kernel changes.
FORMAT = 1
SUPPORT_IR = Path(__file__).with_name("openmp.ll")
_LIBRARY, _MANIFEST, _PACK = "module.so", "manifest.json", "pack.json"
_LINKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ld", ()),
    ("ld.lld", ()),
    ("ld.bfd", ()),
    ("ld.gold", ()),
    ("cc", ("-nostdlib",)),
    ("gcc", ("-nostdlib",)),
    ("clang", ("-nostdlib",)),
)
_log = logging.getLogger("fa2tvm")


@dataclass(frozen=True)
class Module:
    """A loaded program.

    Attributes
    ----------
    manifest
        What `manifest.json` says.
    variant, schedule
        What was compiled, and how.
    function
        The pass with the kernel's own arguments.
    function_on
        The same with one more argument at the end: the number of threads that it may use.
    threads
        Keeps the program connected to its thread pool.
    length_class
        The `Problem.length_class` that a pack holds it for; None for every length.
    """

    manifest: dict[str, Any]
    variant: Variant
    schedule: Schedule
    function: Callable[..., None]
    function_on: Callable[..., None]
    threads: parallel.Attachment
    length_class: str | None = None


@dataclass(frozen=True)
class PackEntry:
    """One module of a pack: what to compile, and the length class that it is for (None: all)."""

    variant: Variant
    schedule: Schedule
    device: Device
    length_class: str | None = None


def build(variant: Variant, schedule: Schedule, device: Device) -> Path:
    """The folder of the compiled program, from the cache or made now.

    Raises
    ------
    InfeasibleSchedule
        Where the schedule does not fit the variant or the device.
    CompileFailed
        Where the TVM compiler or a linker is absent, or the compiler refuses the program.
    """
    schedule.require_feasible(variant, device)
    folder = _cache_root() / module_name(variant, schedule, device)
    if folder.exists():
        try:
            _verified_manifest(folder)
        except StaleModule as damage:
            _log.warning("%s It is built again.", damage)
            _discard(folder)
        else:
            return folder
    with _staging(folder.parent) as staged:
        _compile(variant, schedule, device, staged / _LIBRARY)
        manifest = describe(variant, schedule, device) | {"sha256": _sha256(staged / _LIBRARY)}
        (staged / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _put(staged, folder)
    return folder


def load(path: str | os.PathLike[str], *, trust: bool = False) -> Module:
    """Load a module folder after it is verified; needs no compiler.

    Parameters
    ----------
    trust
        Load it although other users of this machine may write to it.

    Raises
    ------
    StaleModule
        Where checksum, format, versions, machine or CPU features do not fit, or others may have
        changed it.
    """
    import tvm_ffi

    folder = Path(path)
    manifest = _verified_manifest(folder)
    _require_fit(folder, manifest)
    if not trust:
        _require_private(folder, folder / _LIBRARY)
    try:
        variant = Variant(**manifest["variant"])
        schedule = schedule_from_dict(manifest["family"], variant.pass_, manifest["schedule"])
    except (KeyError, TypeError, Fa2tvmError) as error:
        raise StaleModule(f"{folder} describes no program of this version ({error}).") from error
    library = tvm_ffi.load_module(os.fspath((folder / _LIBRARY).absolute()))
    name = variant.pass_
    return Module(
        manifest,
        variant,
        schedule,
        library[name],
        library[f"{name}_threads"],
        parallel.Attachment(library),
    )


def export_pack(entries: Iterable[PackEntry], dest: str | os.PathLike[str]) -> Path:
    """Compile entries into one folder that `load_pack` loads on machines without the compiler.

    Returns
    -------
    Path
        `dest`; a pack that was there is replaced in one rename.

    Raises
    ------
    UnsupportedProblem
        Where `dest` exists and is no pack, or there are no entries.
    CompileFailed, InfeasibleSchedule
        As `build` does.
    """
    target = Path(dest)
    if target.exists() and not (target / _PACK).exists() and any(target.iterdir()):
        raise UnsupportedProblem(
            f"dest is {os.fspath(target)!r}, but it holds something that is no pack; "
            "choose another folder."
        )
    listed: list[dict[str, Any]] = []
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    with _staging(target.absolute().parent) as staged:
        for entry in entries:
            built = build(entry.variant, entry.schedule, entry.device)
            if not (staged / built.name).exists():
                shutil.copytree(built, staged / built.name)
            listed.append(
                {
                    "module": built.name,
                    "length_class": entry.length_class,
                    "manifest_sha256": _sha256(built / _MANIFEST),
                }
            )
        if not listed:
            raise UnsupportedProblem("entries is empty, but a pack holds at least one module.")
        pack = {"format": FORMAT, "modules": listed}
        (staged / _PACK).write_text(json.dumps(pack, indent=1) + "\n", encoding="utf-8")
        _discard(target)
        _put(staged, target)
    return target


def load_pack(path: str | os.PathLike[str], *, trust: bool = False) -> list[Module]:
    """Load a pack's modules that this CPU can run, those that use most of its features first.

    Raises
    ------
    StaleModule
        Where anything is damaged or of another version, or where none of the modules of a variant
        fits this CPU.
    """
    folder = Path(path)
    modules: list[Module] = []
    missing: dict[Variant, StaleModule] = {}
    for row in _pack_rows(folder):
        manifest = _verified_manifest(folder / row["module"], row["manifest_sha256"])
        try:
            _require_features(folder / row["module"], manifest)
        except StaleModule as error:
            missing.setdefault(Variant(**manifest["variant"]), error)
            continue
        loaded = load(folder / row["module"], trust=trust)
        modules.append(replace(loaded, length_class=row["length_class"]))
    for variant, reason in missing.items():
        if all(module.variant != variant for module in modules):
            raise reason
    return sorted(modules, key=lambda module: -len(module.manifest["features"]))


def describe(variant: Variant, schedule: Schedule, device: Device) -> dict[str, Any]:
    """The manifest without the checksum; its digest is the module's name in the cache."""
    support = hashlib.sha256(SUPPORT_IR.read_bytes()).hexdigest()[:12]
    return {
        "format": FORMAT,
        "family": schedule.family,
        "variant": variant.to_dict(),
        "schedule": schedule.to_dict(),
        "target": device.target(),
        "machine": platform.machine(),
        "features": sorted(device.features),
        "program": f"{program_version(schedule.family, variant.pass_)}-{support}",
        "versions": {name: found for name, found in versions().items() if name != "torch"},
    }


def module_name(variant: Variant, schedule: Schedule, device: Device) -> str:
    """What a compiled program is called in the cache: all that shapes its code decides."""
    text = json.dumps(describe(variant, schedule, device), sort_keys=True)
    return f"{variant.name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def is_built(variant: Variant, schedule: Schedule, device: Device) -> bool:
    """Whether the cache has the program."""
    return (_cache_root() / module_name(variant, schedule, device)).exists()


def lower(variant: Variant, schedule: Schedule, device: Device) -> Any:
    """The program as machine code: TVM's executable, not linked yet.

    Raises
    ------
    InfeasibleSchedule
        Where the schedule does not fit the variant or the device.
    CompileFailed
        Where the TVM compiler is absent or refuses the program.
    """
    try:
        import tvm

        from fa2tvm import kernels
    except ImportError as error:
        raise CompileFailed(
            f"the TVM compiler cannot be imported ({error}), but {variant.name} is not compiled "
            "yet; install apache-tvm or load a pack that holds it."
        ) from error
    target = tvm.target.Target(device.target())
    try:
        with target:
            return tvm.compile(kernels.build(variant, schedule, device), target=target)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, Fa2tvmError):
            raise
        first = str(error).strip().splitlines()[:1]
        raise CompileFailed(
            f"TVM refused {variant.name} with schedule {schedule.to_dict()} ({''.join(first)})."
        ) from error


def find_linker() -> tuple[str, tuple[str, ...]] | None:
    """A program that links, with the options that it needs; None where PATH has none."""
    for name, extra in _LINKERS:
        found = shutil.which(name)
        if found:
            return found, extra
    return None


def _compile(variant: Variant, schedule: Schedule, device: Device, library: Path) -> None:
    """Compile the program and our support code and link them into one shared library."""
    program = lower(variant, schedule, device)
    linker = find_linker()
    if linker is None:
        raise CompileFailed(
            f"no linker is on PATH (looked for {', '.join(name for name, _ in _LINKERS)}), but a "
            "module must be linked; install binutils or load a pack."
        )
    import tvm

    objects = [library.with_name("program.o"), library.with_name("support.o")]
    source = library.with_name("support.ll")
    text = SUPPORT_IR.read_text(encoding="utf-8").replace("@PASS@", variant.pass_)
    source.write_text(text, encoding="utf-8")
    program.mod.write_to_file(os.fspath(objects[0]), "o")
    tvm.runtime.load_module(os.fspath(source)).write_to_file(os.fspath(objects[1]), "o")
    _link(linker, objects, library)
    for made in (*objects, source):
        made.unlink()


def _link(linker: tuple[str, tuple[str, ...]], objects: list[Path], library: Path) -> None:
    program, extra = linker
    symbolic = "-Wl,-Bsymbolic" if extra else "-Bsymbolic"
    command = [program, *extra, "-shared", symbolic, "-z", "noexecstack", "-o", os.fspath(library)]
    command += [os.fspath(path) for path in objects]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileFailed(
            f"{program} could not link {library.name} (exit code {done.returncode}): "
            f"{done.stderr.strip()[:300]}"
        )


def _verified_manifest(folder: Path, manifest_sha256: str | None = None) -> dict[str, Any]:
    """The manifest of a module folder whose files are whole."""
    try:
        text = (folder / _MANIFEST).read_bytes()
        manifest = json.loads(text)
        expected = str(manifest["sha256"])
        found = _sha256(folder / _LIBRARY)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StaleModule(f"{folder} is no complete module ({error}).") from error
    if found != expected:
        raise StaleModule(
            f"{folder / _LIBRARY} is damaged: its SHA-256 is {found[:16]}..., but the manifest "
            f"says {expected[:16]}...."
        )
    found = hashlib.sha256(text).hexdigest()
    if manifest_sha256 not in (None, found):
        raise StaleModule(
            f"{folder / _MANIFEST} is damaged: its SHA-256 is {found[:16]}..., but the pack says "
            f"{str(manifest_sha256)[:16]}...."
        )
    return dict(manifest)


def _require_fit(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise StaleModule unless this version and this machine can run the module."""
    if manifest.get("format") != FORMAT:
        raise StaleModule(
            f"{folder} has format {manifest.get('format')}, but this version of fa2tvm reads "
            f"{FORMAT}; export it again."
        )
    built, here = manifest["versions"]["apache-tvm-ffi"], versions()["apache-tvm-ffi"]
    if _minor(built) != _minor(here):
        raise StaleModule(
            f"{folder} was built with apache-tvm-ffi {built}, but {here} is installed; "
            f"install {_minor(built)}.* or export it again."
        )
    if manifest["machine"] != platform.machine():
        raise StaleModule(
            f"{folder} is for {manifest['machine']}, but this machine is {platform.machine()}; "
            "export it here."
        )
    _require_features(folder, manifest)


def _require_features(folder: Path, manifest: dict[str, Any]) -> None:
    lacking = sorted(set(manifest["features"]) - devices.cpu_features())
    if lacking:
        raise StaleModule(
            f"{folder} is compiled for {manifest['target'].get('mcpu')} and may use "
            f"{', '.join(lacking)}, but this CPU ({devices.detect().arch}) does not have it; "
            "export a pack for a lower level."
        )


def _require_private(*paths: Path) -> None:
    for path in paths:
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH:
            raise StaleModule(
                f"{path} has mode {stat.S_IMODE(mode):o}, but code that others may write is not "
                "loaded; take away their permission or pass trust=True."
            )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _pack_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of pack.json, each naming a folder directly inside the pack."""
    try:
        pack = json.loads((folder / _PACK).read_text(encoding="utf-8"))
        rows = [
            {
                "module": str(row["module"]),
                "length_class": row["length_class"],
                "manifest_sha256": str(row["manifest_sha256"]),
            }
            for row in pack["modules"]
        ]
        found = pack["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StaleModule(f"{folder} is no pack ({error}).") from error
    if found != FORMAT:
        raise StaleModule(
            f"{folder} has format {found}, but this version of fa2tvm reads {FORMAT}; "
            "export it again."
        )
    for row in rows:
        if Path(row["module"]).name != row["module"] or row["module"] in (".", ".."):
            raise StaleModule(
                f"{folder / _PACK} names {row['module']!r}, but a module lies directly in its pack."
            )
    return rows


def _cache_root() -> Path:
    """The folder of compiled modules; a private temporary one, with a warning, if need be."""
    root = home() / "cache"
    try:
        root.mkdir(parents=True, exist_ok=True)
        owner = root.stat().st_uid
        if os.geteuid() not in (owner, 0) and owner != 0:
            reason = "it belongs to another user, whose code would run here"
        elif os.access(root, os.W_OK | os.X_OK):
            return root
        else:
            reason = "it is not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    return _temporary_cache(root, reason)


@functools.cache
def _temporary_cache(wanted: Path, reason: str) -> Path:
    root = Path(tempfile.mkdtemp(prefix="fa2tvm-cache-"))
    warnings.warn(
        f"compiled modules cannot be kept in {wanted} ({reason}); they go to {root} for this "
        "process, set FA2TVM_HOME to a folder of yours.",
        RuntimeWarning,
        stacklevel=4,
    )
    return root


@contextmanager
def _staging(parent: Path) -> Iterator[Path]:
    """A folder beside the final one, so that a rename publishes it; removed if it is left over."""
    staged = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
    staged.chmod(0o755 & ~_umask())
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


@functools.cache
def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _put(staged: Path, folder: Path) -> None:
    """Publish a folder; where another process was first, its equal result stands."""
    try:
        staged.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _discard(folder: Path) -> None:
    """Take a folder out of use in one rename, then delete it."""
    if not folder.exists():
        return
    with _staging(folder.absolute().parent) as grave:
        folder.rename(grave / folder.name)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
