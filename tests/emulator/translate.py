"""CUDA source that TVM generates to C++ source that the headers beside this file run.

Kernels and their helpers stay as they are, except for inline assembly: every PTX instruction
becomes a call of the function that `INSTRUCTIONS` names for its opcode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fa2tvm.errors import CompileFailed

# The functions use AVX2; a thread switch needs no more optimisation of the long kernels than -O1.
FLAGS = ("-O1", "-mavx2", "-mfma", "-mf16c", "-fvisibility=hidden")

_TYPES = {
    "b32": "uint32_t",
    "u32": "uint32_t",
    "s32": "int32_t",
    "f32": "float",
    "bf16": "emulator::bf16",
    "f16": "emulator::f16",
}
_NOTHING = ""
# Opcode to function of namespace emulator: {0}, {1} ... are the groups of the pattern, types in
# C++. Operands are its arguments, in their order, after those that stand behind a bar.
INSTRUCTIONS = {
    r"setp\.ne\.b32": "not_equal",
    r"mov\.[bsu]32": "move",
    # Arithmetic.
    r"max\.NaN\.f32": "max_nan",
    r"cvt\.rn\.(bf16|f16)x2\.f32": "narrow_pair<{0}>",
    r"fma\.rn\.(bf16|f16)x2": "fma_pair<{0}>",
    # Memory.
    r"ld\.(global|shared)(?:\.v[24])?\.(b32|f32|s32|u32)": "load_{0}<{1}>",
    r"ld\.acquire\.gpu\.global\.(s32|u32|b32)": "load_acquire<{0}>",
    r"st\.(global|shared)(?:\.v[24])?\.(b32|f32|s32|u32)": "store_{0}<{1}>",
    r"st\.release\.gpu\.global\.(s32|u32|b32)": "store_global<{0}>",
    r"red\.(?:relaxed|release)\.gpu\.global\.add(?:\.v[24])?\.(f32|s32|u32)": "reduce_add<{0}>",
    # Warps.
    r"elect\.sync": "elect",
    r"setmaxnreg\.inc\.sync\.aligned\.u32": 'set_max_registers|"setmaxnreg.inc"|true',
    r"setmaxnreg\.dec\.sync\.aligned\.u32": 'set_max_registers|"setmaxnreg.dec"|false',
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])\.shared\.b16": "load_matrix<{0}, false>",
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])\.trans\.shared\.b16": "load_matrix<{0}, true>",
    r"stmatrix\.sync\.aligned\.m8n8\.x([124])\.shared\.b16": "store_matrix<{0}, false>",
    r"stmatrix\.sync\.aligned\.m8n8\.x([124])\.trans\.shared\.b16": "store_matrix<{0}, true>",
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32": "mma_m16n8k16<{0}>",
    # Barriers.
    r"bar\.sync": "bar_sync",
    r"bar\.arrive": "bar_arrive",
    r"mbarrier\.init\.shared\.b64": "mbarrier_init",
    r"mbarrier\.arrive\.shared\.b64": "mbarrier_arrive",
    r"mbarrier\.arrive\.expect_tx\.shared\.b64": "mbarrier_arrive_expect_tx",
    r"mbarrier\.try_wait\.parity\.acquire\.cta\.shared::cta\.b64": "mbarrier_try_wait_parity",
    # Order of memory: one thread runs at a time, and other threads see what it wrote.
    r"fence\.mbarrier_init\.release\.cluster": _NOTHING,
    r"fence\.proxy\.async\.shared::cta": "fence_proxy_async",
    # Copies.
    r"cp\.async\.cg\.shared\.global": "cp_async<16>",
    r"cp\.async\.commit_group": "cp_async_commit",
    r"cp\.async\.wait_group": "cp_async_wait",
    r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes": "bulk_load",
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::cluster\.global\.mbarrier::complete_tx::bytes": (
        "tensor_load<{0}>"
    ),
    r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32": "bulk_add",
    r"cp\.async\.bulk\.commit_group": "bulk_commit",
    r"cp\.async\.bulk\.wait_group": "bulk_wait",
    r"cp\.async\.bulk\.wait_group\.read": "bulk_wait_read",
    # Warpgroups.
    r"wgmma\.fence\.sync\.aligned": "wgmma_fence",
    r"wgmma\.commit_group\.sync\.aligned": "wgmma_commit",
    r"wgmma\.wait_group\.sync\.aligned": "wgmma_wait",
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2": "wgmma<{0}, {1}>",
}
_SPECIAL = {"%tid.x": "threadIdx.x"}
_END_OF_PREAMBLE = "#define ushort unsigned short\n#endif\n"
_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\((\d+)(?:, \d+)?\) )?(\w+)\(([^)]*)\)(;| \{)'
)
_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
_ASM = re.compile(r"\basm\s*(?:volatile)?\s*\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


def translate(code: str) -> str:
    """C++ source of a module that exports the functions of interface.h.

    Raises
    ------
    CompileFailed
        Where the source has an instruction that is not emulated, or is not of the known form.
    """
    _, found, body = code.partition(_END_OF_PREAMBLE)
    if not found:
        raise CompileFailed(f"the CUDA source does not contain {_END_OF_PREAMBLE!r}.")
    kernels: list[str] = []
    body = _KERNEL.sub(lambda match: _kernel(match, kernels), body)
    body = _SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulator::shared_memory());", body)
    if "__shared__" in body:
        raise CompileFailed("static shared memory is not emulated.")
    return "\n".join(
        (
            '#include "launch.h"',
            '#include "cuda_words.h"',
            _replace_assembly(body),
            f"static const emulator::Kernel kernels[] = {{{', '.join(kernels)}}};",
            "EMULATOR_MODULE(kernels)",
            "",
        )
    )


def _kernel(match: re.Match[str], kernels: list[str]) -> str:
    """A kernel's signature; its definition also enters the module's table."""
    threads, name, parameters, end = match.groups()
    declared, passed = [], []
    for place, parameter in enumerate(re.sub(r"\b__restrict__ ", "", parameters).split(", ")):
        type_, _, word = parameter.rpartition(" ")
        if type_.endswith("*"):
            type_ = type_.removesuffix("*")
            declared.append(f"emulator::Global<{type_}> {word}")
            passed.append(f"emulator::Global<{type_}>(*({type_}**)a[{place}])")
            continue
        type_ = type_.replace("const __grid_constant__ CUtensorMap", "const CUtensorMap&")
        declared.append(f"{type_} {word}")
        passed.append(f"*({type_.removesuffix('&')}*)a[{place}]")
    if end != ";":
        call = f"[](void** a) {{ {name}({', '.join(passed)}); }}"
        kernels.append(f'{{"{name}", {call}, {threads or 1024}}}')
    return f"static void {name}({', '.join(declared)}){end}"


def _replace_assembly(body: str) -> str:
    pieces, at = [], 0
    while match := _ASM.search(body, at):
        end = _closing(body, match.end())
        pieces += [body[at : match.start()], _assembly(body[match.end() : end])]
        at = end + 1
    return "".join((*pieces, body[at:]))


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that was opened before `start` closes."""
    depth, at = 1, start
    while depth:
        if text[at] == '"':
            at = _string(text, at).end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _string(text: str, at: int) -> re.Match[str]:
    match = _STRING.match(text, at)
    if match is None:
        raise CompileFailed(f"a string of inline assembly does not end: {text[at : at + 60]!r}.")
    return match


def _assembly(statement: str) -> str:
    """The C++ block of one asm statement: template, outputs, inputs, clobbers."""
    sections = _split(statement, ":")
    template = "".join(_STRING.findall(sections[0])).replace("\\n", "\n")
    operands: list[tuple[bool, str]] = []
    for section in sections[1:3]:
        for operand in _split(section, ","):
            if operand.strip():
                constraint, _, expression = operand.strip().partition("(")
                written = constraint.strip(' "')[0] in "=+"
                operands.append((written, f"({expression.rstrip().removesuffix(')')})"))
    return "{ " + " ".join(_instructions(template, operands)) + " }"


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators that are in no string and no bracket."""
    parts, depth, at, start = [], 0, 0, 0
    while at < len(text):
        if text[at] == '"':
            at = _string(text, at).end()
            continue
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(text[at], 0)
        if text[at] == separator and not depth:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return [*parts, text[start:]]


def _instructions(template: str, operands: list[tuple[bool, str]]) -> Iterator[str]:
    """C++ statements of PTX statements."""
    registers: list[str] = []
    for piece in template.split(";"):
        statement = piece.strip().removeprefix("{").removesuffix("}" if "{" not in piece else "")
        statement = statement.strip()
        while label := re.match(r"(\w+):\s+", statement + " "):
            yield f"{label[1]}:;"
            statement = statement[label.end() :]
        if not statement:
            continue
        if statement.startswith(".reg "):
            kind, name = statement.split()[1:]
            registers.append(name.replace("%%", "%"))
            yield f"{'bool' if kind == '.pred' else 'uint32_t'} {_name(registers[-1])};"
            continue
        yield _instruction(statement.replace("%%", "%"), operands, registers) + ";"


def _name(register: str) -> str:
    return "register_" + register.removeprefix("%")


def _instruction(statement: str, operands: list[tuple[bool, str]], registers: list[str]) -> str:
    guard = ""
    if condition := re.match(r"@(\S+)\s+", statement):
        guard = f"if ({_name(condition[1])}) "
        statement = statement[condition.end() :]
    opcode, _, rest = statement.partition(" ")
    if opcode in ("bra", "bra.uni"):
        return f"{guard}goto {rest.strip()}"
    function = _function(opcode)
    if function == _NOTHING:
        return ""
    function, *arguments = function.split("|")
    for operand in _split(rest, ","):
        if operand.strip() not in ("", "_"):
            arguments += _operand(operand.strip(), operands, registers)
    return f"{guard}emulator::{function}({', '.join(arguments)})"


def _function(opcode: str) -> str:
    for pattern, function in INSTRUCTIONS.items():
        if match := re.fullmatch(pattern, opcode):
            return function.format(*(_TYPES.get(group, group) for group in match.groups()))
    raise CompileFailed(
        f"the instruction {opcode} is not emulated; add it to tests/emulator/translate.py."
    )


def _operand(text: str, operands: list[tuple[bool, str]], registers: list[str]) -> Iterator[str]:
    """Arguments of one PTX operand; an address in brackets may have several parts."""
    if text.startswith("["):
        for part in _split(text[1:-1], ","):
            yield from _operand(part.strip(), operands, registers)
    elif text.startswith("{"):
        parts = [part.strip() for part in text[1:-1].split(",")]
        written = all(operands[int(part[1:])][0] for part in parts)
        inside = (argument for part in parts for argument in _operand(part, operands, registers))
        yield f"emulator::{'out' if written else 'in'}({', '.join(inside)})"
    elif match := re.fullmatch(r"%(\d+)", text):
        yield operands[int(match[1])][1]
    elif text.startswith("_|"):
        yield from _operand(text.removeprefix("_|"), operands, registers)
    elif text in registers:
        yield _name(text)
    elif text in _SPECIAL:
        yield _SPECIAL[text]
    else:
        yield str(int(text, 0))
