"""The vLLM adapter's table: every op has an answer, and an architecture is never guessed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from deepinfer_kernels_cuda.adapters.vllm import translate  # noqa: E402
from deepinfer_kernels_cuda.capability import OPS  # noqa: E402


def by_op(asked: tuple[str, ...], capability: int, interpreted: bool = False) -> dict[str, translate.Decision]:
    return {decision.op: decision for decision in translate.decide(asked, capability, interpreted)}


def test_every_op_can_be_asked_for_or_says_why_not() -> None:
    assert set(translate.LAYERS) | set(translate.NO_SEAM) <= set(OPS)
    assert not set(translate.LAYERS) & set(translate.NO_SEAM)
    assert set(by_op((), 90)) == set(OPS)
    for decision in translate.decide(("rms_norm",), 90, False):
        assert len(decision.reason) > 10


def test_only_what_is_asked_for_is_replaced() -> None:
    assert all(decision.layer is None for decision in translate.decide((), 90, False))
    assert by_op((), 90)["rms_norm"].reason == "not asked for: DEEPINFER_KERNELS=rms_norm"
    replaced = [d for d in translate.decide(translate.read_switch("all"), 90, False) if d.layer]
    assert [d.op for d in replaced] == list(translate.LAYERS)


@pytest.mark.parametrize("capability", [0, 75, 80, 89, 91, 103, 110, 120])
def test_an_architecture_without_a_kernel_is_named(capability: int) -> None:
    decision = by_op(("rms_norm",), capability)["rms_norm"]
    assert decision.layer is None
    device = "without a CUDA device" if capability == 0 else f"compute capability {capability / 10}"
    assert device in decision.reason
    assert "90, 100" in decision.reason


@pytest.mark.parametrize("capability", [90, 100])
def test_hardware_that_was_not_there_is_said_to_have_not_been_there(capability: int) -> None:
    reason = f"compiles for sm_{capability}, not run on it"
    assert by_op(("rms_norm",), capability)["rms_norm"] == translate.Decision("rms_norm", "RMSNorm", reason)


def test_the_interpreter_stands_in_only_where_no_device_is() -> None:
    assert by_op(("rms_norm",), 0, True)["rms_norm"].layer == "RMSNorm"
    assert by_op(("rms_norm",), 80, True)["rms_norm"].layer is None


def test_the_switch_names_ops_and_refuses_others_with_the_reason() -> None:
    assert translate.read_switch("") == translate.read_switch("0") == ()
    assert translate.read_switch(" rms_norm, ") == ("rms_norm",)
    assert translate.read_switch("all") == tuple(translate.LAYERS)
    with pytest.raises(
        ValueError, match=r"'router': vLLM's DeepSig V4.1 model names its own kernels.* it knows rms_norm, all"
    ):
        translate.read_switch("rms_norm,router")
    with pytest.raises(ValueError, match="'rmsnorm'; it knows rms_norm, all"):
        translate.read_switch("rmsnorm")
