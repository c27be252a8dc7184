"""What a module says about itself, and whether it is whole and may run here.

All of it is decided before the first instruction of the module runs.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any, NamedTuple

from fa2tvm import cuda_runtime
from fa2tvm import device as devices
from fa2tvm.device import Device
from fa2tvm.errors import StaleModule, shown
from fa2tvm.problem import Variant
from fa2tvm.records import program_version, versions
from fa2tvm.schedule import Schedule
from fa2tvm.trust import contents

# Raised whenever the manifest or the way that launch.py calls a kernel changes.
FORMAT = 1
LIBRARY, MANIFEST = "module.so", "manifest.json"
# A manifest has 2 KB, a pack lists hundreds of modules; a library has 100 KB.
_MOST_BYTES = {".json": 4 << 20, ".so": 256 << 20}
# Code that is linked into every module of a CPU.
SUPPORT_IR = Path(__file__).with_name("openmp.ll")
_FIELDS: dict[str, type] = {
    "family": str,
    "variant": dict,
    "schedule": dict,
    "target": dict,
    "machine": str,
    "features": list,
    "program": str,
    "versions": dict,
    "sha256": str,
}


def describe(variant: Variant, schedule: Schedule, device: Device) -> dict[str, Any]:
    """The manifest without the checksum; its digest is the module's name in the cache."""
    program = program_version(schedule.family, variant.pass_)
    compiled_in: dict[str, Any] = {}
    if device.kind == "llvm":
        program += f"-{hashlib.sha256(SUPPORT_IR.read_bytes()).hexdigest()[:12]}"
    else:
        compiled_in["multiprocessors"] = device.cores
    return {
        "format": FORMAT,
        "family": schedule.family,
        "variant": variant.to_dict(),
        "schedule": schedule.to_dict(),
        "target": device.target(),
        "machine": platform.machine(),
        "features": sorted(device.features),
        "program": program,
        "versions": {name: found for name, found in versions().items() if name != "torch"},
        **compiled_in,
    }


class Verified(NamedTuple):
    """A module that is whole: what its manifest says, and the very bytes that were verified."""

    manifest: dict[str, Any]
    library: bytes


def read_object(path: Path, what: str, *, trust: bool) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a JSON file and the object in it, whose `format` is ours.

    Parameters
    ----------
    what
        What the file's folder should be, for the error.
    trust
        As for `verified`.

    Raises
    ------
    StaleModule
        Where the file cannot be read, holds anything else, or has another format.
    """
    try:
        data = _contents(path, trust)
        # Without the hook "NaN" would be a number; a deep nesting ends in RecursionError.
        found = json.loads(data, parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise StaleModule(f"{path.parent} is no {what} ({error}); export it again.") from error
    if not isinstance(found, dict):
        raise StaleModule(
            f"{path.parent} is no {what} ({path.name} holds a {type(found).__name__}, not an "
            "object); export it again."
        )
    if found.get("format") != FORMAT or isinstance(found["format"], bool):
        raise StaleModule(
            f"{path.parent} has format {shown(found.get('format'))}, but this version of fa2tvm "
            f"reads {FORMAT}; export it again."
        )
    return data, found


def _contents(path: Path, trust: bool) -> bytes:
    return contents(path, _MOST_BYTES[path.suffix], trust=trust)


def verified(folder: Path, manifest_sha256: str | None = None, *, trust: bool) -> Verified:
    """A module folder whose files are whole and lie in it.

    Parameters
    ----------
    manifest_sha256
        What the manifest's own checksum must be, where somebody has written it down.
    trust
        Whether others may write the files.

    Raises
    ------
    StaleModule
        Where a file is missing, damaged or elsewhere, the manifest lacks something, or others may
        write a file.
    """
    data, manifest = read_object(folder / MANIFEST, "complete module", trust=trust)
    for name, kind in _FIELDS.items():
        if type(manifest.get(name)) is not kind:
            raise StaleModule(
                f"{folder / MANIFEST} has {name} {shown(manifest.get(name))}, but it must be of "
                f"type {kind.__name__}; export it again."
            )
    strings = [*manifest["features"], manifest["versions"].get("apache-tvm-ffi")]
    if not all(isinstance(value, str) for value in strings):
        raise StaleModule(
            f"{folder / MANIFEST} has {shown(strings)} as CPU features and version of "
            "apache-tvm-ffi, but all must be strings; export it again."
        )
    try:
        library = _contents(folder / LIBRARY, trust)
    except (OSError, ValueError) as error:  # a name that no file system takes
        raise StaleModule(f"{folder} is no complete module ({error}); export it again.") from error
    found = hashlib.sha256(library).hexdigest()
    _require_equal(folder / LIBRARY, found, manifest["sha256"], "manifest")
    if manifest_sha256 is not None:
        found = hashlib.sha256(data).hexdigest()
        _require_equal(folder / MANIFEST, found, manifest_sha256, "pack")
    return Verified(manifest, library)


def require_fit(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise StaleModule unless this version and this machine can run the module."""
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
    require_features(folder, manifest)


def require_features(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise StaleModule where this CPU lacks a feature that the code may use, or there is no GPU.

    A GPU runs code of its own architecture only, so one of them must have just that.
    """
    if manifest["target"].get("kind") == "cuda":
        arch, found = manifest["target"].get("arch"), cuda_runtime.architectures()
        if arch not in found.values():
            here = ", ".join(f"{name} is {its}" for name, its in found.items())
            raise StaleModule(
                f"{folder} is compiled for {arch}, but {here or 'PyTorch finds no GPU here'}; "
                "export it for the GPU at hand."
            )
    lacking = sorted(set(manifest["features"]) - devices.cpu_features())
    if lacking:
        raise StaleModule(
            f"{folder} is compiled for {manifest['target'].get('mcpu')} and may use "
            f"{', '.join(lacking)}, but this CPU ({devices.detect().arch}) does not have it; "
            "export a pack for a lower level."
        )


def sha256_of(path: Path) -> str:
    """The checksum of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _require_equal(path: Path, found: str, expected: str, source: str) -> None:
    if found != expected:
        raise StaleModule(
            f"{path} is damaged: its SHA-256 is {found[:16]}..., but the {source} says "
            f"{expected[:16]}...; export it again."
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
