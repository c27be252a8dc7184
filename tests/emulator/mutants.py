"""Programs with a synchronisation left out: what the emulator must find fault with.

All mutants of a program are one module, in which a number says what is left out: every call of one
kind of synchronisation, or one call alone. One call alone may be one too many in a program that is
right; all of a kind are not.
"""

from __future__ import annotations

import re

NAME = "fa2tvm_mutant"
_CALL = re.compile(
    r"^( +)((tvm_builtin_(?:ptx_(?:mbarrier_(?:init|arrive)|bar_|cp_async_\w*(?:wait|commit)_group"
    r"|wgmma_(?:fence|wait_group|commit_group))|cuda_(?:mbarrier_wait|cta_sync))\w*)\(.*\);)$",
    re.MULTILINE,
)


def names(code: str) -> list[str]:
    """What each mutant of CUDA source leaves out: first the kinds, then the calls."""
    calls = list(_CALL.finditer(code))
    return [f"every {kind}" for kind in _kinds(code)] + [match[2] for match in calls]


def instrument(code: str) -> str:
    """The source with a number, -1 for no mutant, that names what to leave out."""
    kinds = _kinds(code)
    count = iter(range(len(kinds), len(code)))

    def guarded(match: re.Match[str]) -> str:
        indent, call, kind = match.groups()
        wanted = f"{NAME} != {kinds.index(kind)} && {NAME} != {next(count)}"
        return f"{indent}if ({wanted}) {call}"

    body = _CALL.sub(guarded, code)
    number = f'extern "C" __attribute__((visibility("default"))) int {NAME} = -1;\n'
    kernels = body.index('extern "C" __global__')
    return body[:kernels] + number + body[kernels:]


def _kinds(code: str) -> list[str]:
    return sorted({match[3] for match in _CALL.finditer(code)})
