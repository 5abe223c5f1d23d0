"""Whether this machine has an Ascend device that torch can reach: the only place that asks."""

from __future__ import annotations

import importlib
from importlib.util import find_spec


def is_supported() -> str | None:
    """Return None when an Ascend NPU is usable from torch here, else the reason as one sentence.

    Imports `torch_npu` when it is installed, which registers the `npu` device with torch.
    """
    if find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install torch-npu, in the version of torch here"
    try:
        torch_npu = importlib.import_module("torch_npu")
    except Exception as error:  # torch_npu raises RuntimeError, OSError or ImportError, depending on what CANN lacks
        return f"torch_npu does not load here (is CANN installed?): {type(error).__name__}: {error}"
    if not torch_npu.npu.is_available():
        return "torch_npu loads, but no Ascend device answers: check npu-smi info"
    return None
