"""Kernels compile ahead of time for GPUs that are not here, within hardware limits and without surprise spills."""

from __future__ import annotations

import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from deepinfer_kernels_cuda import catalogue  # noqa: E402
from deepinfer_kernels_cuda.aot import CompileReport, CompileReportError, machine_text  # noqa: E402
from deepinfer_kernels_cuda.catalogue import SPECS  # noqa: E402
from deepinfer_kernels_cuda.experts import NARROW  # noqa: E402
from deepinfer_kernels_cuda.mhc import _row_kernel  # noqa: E402
from deepinfer_kernels_cuda.native import compile_native, native_reason  # noqa: E402

CASES = [
    pytest.param(spec, arch, id=f"{spec.name}-sm{arch}", marks=[] if spec.quick else pytest.mark.slow)
    for spec in SPECS
    for arch in spec.archs
]


@pytest.mark.parametrize(("spec", "arch"), CASES)
def test_kernel_compiles_within_limits(spec, arch) -> None:
    if not spec.quick and os.environ.get("DEEPINFER_KERNELS_COMPILE_ALL") != "1":
        pytest.skip("the full set runs with DEEPINFER_KERNELS_COMPILE_ALL=1")
    report = spec.compile(arch)
    assert report.arch == arch
    assert report.registers > 8


def test_products_of_the_experts_stay_under_way() -> None:
    """The compiler waits after each product, silently, where it cannot keep the operands of those under way apart."""
    if native_reason() is not None:
        pytest.skip(native_reason())
    code = compile_native("experts.cu", 90, NARROW.defines)
    for entry in ("experts_up", "experts_down"):
        sass = machine_text(code, entry)
        products, waits = (len(re.findall(word, sass)) for word in (r"\bHGMMA\b", r"\bWARPGROUP\.DEPBAR\b"))
        assert products == 6 * 8 * 4, "six widths, eight batches of four products"
        assert waits == 6 * 9, "a wait a batch and one at the end of a stage"


@pytest.mark.parametrize("splits", [1, 4])
def test_products_of_sparse_mla_stay_under_way(splits) -> None:
    """Likewise: logits are queued behind a product, and a wait a product would take that away.

    In a cluster probabilities are held in registers meanwhile, for which its consumers have 208.
    """
    if native_reason() is not None:
        pytest.skip(native_reason())
    sass = machine_text(compile_native("sparse_mla.cu", 90, (f"SPLITS={splits}",)), "sparse_mla")
    products, waits = (len(re.findall(word, sass)) for word in (r"\bHGMMA\b", r"\bWARPGROUP\.DEPBAR\b"))
    assert products == 2 * 32 + 3 * 8, (
        "logits with and without a product before them; three places that add a tile's product"
    )
    assert waits == 4, "a wait a batch"


def test_products_of_the_router_stay_under_way_and_nothing_fences() -> None:
    """A fence in the loop waits for the copies that are to come under the products: it took a step from 0.4 to 1.0 us."""
    if native_reason() is not None:
        pytest.skip(native_reason())
    sass = machine_text(compile_native("router_product.cu", 90, ("SELECTS=1",)), "router_product")
    counts = {word: len(re.findall(rf"\b{word}\b", sass)) for word in ("HGMMA", "WARPGROUP.DEPBAR", "MEMBAR")}
    assert counts == {"HGMMA": 4, "WARPGROUP.DEPBAR": 2, "MEMBAR": 0}


@pytest.mark.parametrize(("groups", "warps"), [(2, 2), (10, 12)])
def test_the_seam_fits_registers_and_shared_memory(groups, warps) -> None:
    """Its source asserts that the shared memory asked for is what it lays out; a block on Hopper has 227 KiB at most."""
    if native_reason() is not None:
        pytest.skip(native_reason())
    kernel = _row_kernel(groups)
    assert kernel.threads == 32 * (warps + 4)
    assert kernel.shared <= 227 * 1024
    sass = machine_text(compile_native(kernel.source, 90, kernel.defines), "mhc_step")
    assert not re.findall(r"\b(?:LDL|STL)\b", sass), "spills"
    assert len(re.findall(r"\bHMMA\b", sass)) == 2 * 4 * 3, (
        "one loop over tiles: halves, streams, rows of the projection"
    )


def test_names_are_unique() -> None:
    assert len({spec.name for spec in SPECS}) == len(SPECS)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [("shared_bytes", 240_000, "shared memory"), ("tensor_memory", 528, "tensor memory"), ("mma", 0, "matrix instructions"),
     ("registers", 4, "bare trap"), ("stack_bytes", 64, "stack frame")],
)  # fmt: skip
def test_report_refuses(field, value, word) -> None:
    good = {"name": "k", "arch": 100, "registers": 100, "stack_bytes": 0, "spill_instructions": 0, "shared_bytes": 1000,
            "tensor_memory": 512, "mma": 4, "traps": 0}  # fmt: skip
    assert CompileReport(**good).check(min_mma=1)
    with pytest.raises(CompileReportError, match=word):
        CompileReport(**(good | {field: value})).check(min_mma=1)


def test_a_kernel_that_is_not_there_is_named(capsys) -> None:
    assert catalogue.main(["rms_norm", "nosuch"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("no kernel 'nosuch'; there are ")
    assert " rms_norm," in said.err
