"""One compilation of a kernel as data, with the limits that its machine code must keep; no GPU is needed."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from typing import Any

from .aot import CompileReport, compile_kernel, native_report
from .native import compile_native


@dataclass(frozen=True)
class KernelSpec:
    """One compilation.

    Attributes:
        name: Unique name of the case.
        target: `module:function` inside this package.
        types: Argument types in `name=type` words; `*bf16` a pointer, `i32`, `i64`, `fp32` scalars.
        constants: Values of the constexpr arguments.
        archs: Compute capabilities.
        options: Launch options.
        divisible: Integer arguments known to be multiples of 16.
        min_mma: Matrix instructions that must be there.
        max_stack: Bytes of stack frame that are tolerated (spills).
        quick: Part of the default test run.
    """

    name: str
    target: str
    types: str
    constants: dict[str, Any]
    archs: tuple[int, ...] = (90, 100)
    options: dict[str, Any] = field(default_factory=lambda: {"num_warps": 4})
    divisible: tuple[str, ...] = ()
    min_mma: int = 0
    max_stack: int = 0
    quick: bool = False

    def compile(self, arch: int) -> CompileReport:
        """Compile for one architecture and check the limits."""
        module, function = self.target.split(":")
        kernel = getattr(importlib.import_module(f".{module}", __package__), function)
        signature = dict(word.split("=") for word in self.types.split())
        # As it is launched: overlapping with the kernel before.
        constants = self.constants | ({"PDL": 1} if any(p.name == "PDL" for p in kernel.params) else {})
        _, report = compile_kernel(kernel, signature, constants, arch, divisible=self.divisible, **self.options)
        # A kernel that is warp-specialised asks for its registers at run time; its entry count says nothing.
        return report.check(min_mma=self.min_mma, max_stack=self.max_stack)


@dataclass(frozen=True)
class NativeSpec:
    """One entry (`name` up to a dash) of a CUDA C++ source; `shared` is dynamic, bytes; the rest as in `KernelSpec`."""

    name: str
    source: str
    shared: int = 0
    defines: tuple[str, ...] = ()
    archs: tuple[int, ...] = (90,)
    min_mma: int = 0
    max_stack: int = 0
    quick: bool = False

    def compile(self, arch: int) -> CompileReport:
        """Compile the source and check the limits of this entry."""
        code = _machine_code(self.source, arch, self.defines)
        report = native_report(code, self.name.split("-")[0], arch, self.shared)
        return report.check(min_mma=self.min_mma, max_stack=self.max_stack)


@functools.lru_cache(maxsize=4)
def _machine_code(source: str, arch: int, defines: tuple[str, ...]) -> bytes:
    return compile_native(source, arch, defines)
