"""V4.1 in the native engine on a GPU against numbers of an independent implementation.

The oracle states a tolerance of 1e-3 on every logit; float32 sums in another order stay far below it, while one cache entry
rounded the other way or one other selection moves logits by more.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepinfer_kernels_cuda")
pytest.importorskip("deepinfer_offline")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ORACLE = Path(__file__).parents[3] / "apps" / "offline" / "tests" / "data" / "v41-oracle"


@pytest.mark.parametrize("name", ["dev-backbone", "dev-engram", "dev-quant"])
def test_oracle_cases_in_float32(name: str) -> None:
    from deepinfer_offline.engine.native.build import build_native
    from deepinfer_offline.engine.options import EngineOptions
    from deepinfer_offline.models.deepsig_v41.device import DeviceBackbone
    from deepinfer_offline.weights.source import resolve_model

    folder = str(ORACLE / name)
    options = EngineOptions(
        model=folder, device="cuda", dtype="float32", kv_memory=64 << 20, max_running=4, max_model_len=256
    )
    engine = build_native(options, resolve_model(folder), None)
    assert isinstance(engine._parts.runner.model.backbone, DeviceBackbone)
    cases = np.load(ORACLE / name / "cases.npz")
    for case in range(2):
        expected = cases[f"seq{case}_logits"]
        found = engine.logits(cases[f"seq{case}_ids"].tolist())
        error = np.abs(found - expected).max()
        assert error <= 1e-3, f"case {case}: {error:.2e}"
    engine.close()
