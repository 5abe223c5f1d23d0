"""The switch: `--worker-extension-cls deepinfer_specdec.adapters.vllm.worker.PlannedSpeculation`.

vLLM mixes the class into its workers and calls its hooks: no other process of vLLM is touched, and nothing before a worker
has its device.
"""

from __future__ import annotations

from typing import Any

from deepinfer_specdec.adapters.vllm import compat

compat.require_supported()


class PlannedSpeculation:
    """Puts this package's prices, calibration and budget into vLLM's adaptive verification.

    Workers without `enable_adaptive_verification` build no manager, and stay as they are.
    """

    model_runner: Any

    def init_worker_extension(self) -> None:
        """Called by vLLM when the device is ready and no model is loaded.

        Raises:
            ImportError: vLLM is not what this adapter was tested with.
        """
        compat.require_seam()
        from deepinfer_specdec.adapters.vllm.admission import assign_draft_budget
        from deepinfer_specdec.adapters.vllm.verification import PlannedVerification

        compat.replace_manager(PlannedVerification, assign_draft_budget)
        compat.let_steps_skip_drafts(self.model_runner)

    def destroy_worker_extension(self) -> None:
        """Called by vLLM when the worker shuts down: a later engine of this process finds vLLM as it was."""
        compat.restore_manager()
        compat.let_steps_be(self.model_runner)

    def speculation_report(self) -> dict[str, object] | None:
        """What `Report.as_dict` says, or None where this package does not run the verification.

        `llm.collective_rpc("speculation_report")` returns one a worker; the first of each tensor-parallel group counts.
        """
        manager = getattr(self.model_runner, "adaptive_verification", None)
        report = getattr(manager, "report", None)
        return None if report is None else report.as_dict()
