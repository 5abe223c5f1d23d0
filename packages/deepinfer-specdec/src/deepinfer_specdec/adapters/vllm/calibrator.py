"""Temperatures for the confidences of vLLM's drafter: from a file, and refitted beside the serving loop."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.adapters.vllm.options import VerificationOptions
from deepinfer_specdec.errors import CalibrationError
from deepinfer_specdec.scheduling.calibration import OnlineCalibration, TemperatureScaling

CLIP = 1e-6  # vLLM hands out sigmoids; further out their logits are rounding


class Calibrator:
    """Learns sequential temperatures from verified blocks. A fit takes tens of milliseconds, so a thread does it.

    Args:
        width: drafts a request.
        options: what the user chose.

    Raises:
        CalibrationError: a file that is none, one for shorter drafts, or one with offsets.
    """

    def __init__(self, width: int, options: VerificationOptions) -> None:
        self._options = options
        scaling = TemperatureScaling.identity(width)
        if options.temperatures:
            scaling = TemperatureScaling.load(options.temperatures)
            if scaling.temperatures.size < width:
                raise CalibrationError(
                    f"{options.temperatures} has {scaling.temperatures.size} temperatures; allowed: at least {width}"
                )
            if scaling.offsets.any():
                raise CalibrationError(
                    f"{options.temperatures} has offsets; allowed: temperatures alone, as training with --verification standard "
                    "writes them"
                )
        self._online = OnlineCalibration(width, refit_every=1 << 62, start=scaling)
        self._width = width
        self._waiting: list[NDArray[np.float32]] = []
        self._blocks = 0
        self._thread: threading.Thread | None = None
        self.fits = 0

    @property
    def temperatures(self) -> list[float]:
        """One a column, of the last finished fit."""
        return self._online.scaling.temperatures[: self._width].tolist()

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in rows of (confidences, verified, accepted) [R, K + 2]; starts a fit when enough have come together."""
        if not self._options.online:
            return
        rows = rows[rows[:, self._width] > 0]
        self._waiting.append(rows)
        self._blocks += rows.shape[0]
        if self._blocks >= self._options.refit_every and not self._busy:
            taken, self._waiting, self._blocks = np.concatenate(self._waiting), [], 0
            self._thread = threading.Thread(target=self._fit, args=(taken,), name="deepinfer-sts", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait for a fit that is under way."""
        if self._thread is not None:
            self._thread.join()

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _fit(self, rows: NDArray[np.float32]) -> None:
        confidences = np.clip(rows[:, : self._width].astype(np.float64), CLIP, 1.0 - CLIP)
        logits = np.log(confidences) - np.log1p(-confidences)
        verified, accepted = rows[:, self._width].astype(np.int32), rows[:, self._width + 1].astype(np.int32)
        self._online.observe(logits, accepted, verified)
        self._online.refit()
        self.fits += 1
        if self._options.save_temperatures:
            self._online.scaling.save(self._options.save_temperatures)
