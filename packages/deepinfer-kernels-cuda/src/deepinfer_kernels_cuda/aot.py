"""Ahead-of-time compilation for a GPU that is not here, and what the compiler says about the result.

Used by tests and by `python -m deepinfer_kernels_cuda.aot`: a kernel that compiles is not a kernel that ran.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .errors import KernelError

#: Shared memory a block may have, bytes (both sm_90 and sm_100: 227 KiB).
SHARED_LIMIT = 227 * 1024
#: Columns of tensor memory an SM of sm_100 has.
TENSOR_MEMORY_LIMIT = 512


class CompileReportError(KernelError, AssertionError):
    """A compiled kernel breaks a limit: the message names the kernel, the figure and the limit."""


@dataclass(frozen=True)
class CompileReport:
    """What came out of one compilation.

    Attributes:
        name: Kernel name.
        arch: 90 or 100.
        registers: Registers a thread at entry (a warp-specialised kernel redistributes them).
        stack_bytes: Stack frame of a thread: spills and local arrays.
        spill_instructions: Loads and stores of local memory in the machine code.
        shared_bytes: Static and dynamic shared memory.
        tensor_memory: Columns of tensor memory (0 on sm_90).
        mma: Matrix instructions in the PTX.
        traps: `trap` instructions in the PTX.
    """

    name: str
    arch: int
    registers: int
    stack_bytes: int
    spill_instructions: int
    shared_bytes: int
    tensor_memory: int
    mma: int
    traps: int

    def check(self, *, min_mma: int = 0, max_stack: int = 0) -> CompileReport:
        """Raise `CompileReportError` where a limit is broken; return self otherwise.

        Raises:
            CompileReportError: Shared or tensor memory over the hardware's limit, too few matrix instructions, a body
                that is a bare trap (Triton emits one, silently, when tensor memory overflows), or spills.
        """
        limits = (
            (self.shared_bytes <= SHARED_LIMIT, f"shared memory {self.shared_bytes} B > {SHARED_LIMIT} B"),
            (self.tensor_memory <= TENSOR_MEMORY_LIMIT, f"tensor memory {self.tensor_memory} > {TENSOR_MEMORY_LIMIT}"),
            (self.mma >= min_mma, f"{self.mma} matrix instructions < {min_mma}"),
            (self.registers > 8, f"{self.registers} registers: the body is empty or a bare trap"),
            (self.stack_bytes <= max_stack, f"stack frame {self.stack_bytes} B > {max_stack} B"),
        )
        broken = [message for ok, message in limits if not ok]
        if broken:
            raise CompileReportError(f"{self.name} for sm_{self.arch}: {'; '.join(broken)}")
        return self


def compile_kernel(
    fn: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    arch: int,
    *,
    divisible: tuple[str, ...] = (),
    **options: Any,
) -> tuple[Any, CompileReport]:
    """Compile a `@triton.jit` or `@gluon.jit` kernel for sm_90 or sm_100 without a GPU.

    Args:
        fn: The kernel.
        signature: Argument name to Triton type (`*bf16`, `i32`, `fp32`, ...), constants left out.
        constants: Values of the `constexpr` arguments.
        arch: 90 or 100.
        divisible: Integer arguments that are multiples of 16, as a launch would find (pointers and strides always are).
        **options: `num_warps`, `num_stages`, ... of the launch.

    Returns:
        The compiled kernel and its report.
    """
    names = [p.name for p in fn.params]
    full = {name: "constexpr" if name in constants else signature[name] for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    # Pointers and strides of real tensors are multiples of 16, which is what lets loads be 16 bytes wide.
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and (full[name].startswith("*") or "stride" in name or name in divisible)
    }
    if hasattr(fn, "is_gluon") and fn.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource(fn, full, constexprs, attrs)
    else:
        source = ASTSource(fn, full, constexprs, attrs)
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return kernel, report(kernel, fn.__name__, arch)


def _binary(name: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(path)


def _dump(code: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [_binary("cuobjdump"), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def report(kernel: Any, name: str, arch: int) -> CompileReport:
    """Read registers, stack, shared memory and instruction counts off a compiled Triton kernel."""
    ptx = kernel.asm["ptx"]
    usage = _dump(kernel.asm["cubin"], "-res-usage") + _dump(kernel.asm["cubin"], "-sass")
    return CompileReport(
        name=name,
        arch=arch,
        registers=_largest(r"REG:(\d+)", usage),
        stack_bytes=_largest(r"STACK:(\d+)", usage),
        spill_instructions=len(re.findall(r"\b(?:LDL|STL)\b", usage)),
        shared_bytes=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, "tmem_size", 0) or 0,
        mma=len(re.findall(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)", ptx)),
        traps=len(re.findall(r"^\s*trap;", ptx, re.M)),
    )


def machine_text(code: bytes, entry: str) -> str:
    """The instructions of one entry of CUDA C++ machine code."""
    return next(part for part in _dump(code, "-sass").split("Function : ")[1:] if part.split()[0] == entry)


def native_report(code: bytes, entry: str, arch: int, shared: int) -> CompileReport:
    """The same of one entry of CUDA C++ machine code; `shared` is what its launch asks for, bytes."""
    usage = next(part for part in _dump(code, "-res-usage").split(" Function ")[1:] if part.startswith(f"{entry}:"))
    sass = machine_text(code, entry)
    return CompileReport(
        name=entry,
        arch=arch,
        registers=_largest(r"REG:(\d+)", usage),
        stack_bytes=_largest(r"STACK:(\d+)", usage),
        spill_instructions=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        # A kilobyte of what the compiler reports is the driver's, beside the 227 of a block.
        shared_bytes=max(_largest(r"SHARED:(\d+)", usage) - 1024, 0) + shared,
        tensor_memory=0,
        mma=len(re.findall(r"\bH[GM]*MMA\b", sass)),
        traps=len(re.findall(r"\bBPT\.TRAP\b", sass)),
    )


def _largest(pattern: str, text: str) -> int:
    return max(map(int, re.findall(pattern, text)), default=0)
