"""Temperatures inside vLLM: learned beside the loop from what vLLM verified, kept in a file, refused when they do not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from deepinfer_specdec.adapters.vllm.calibrator import Calibrator
from deepinfer_specdec.adapters.vllm.options import VerificationOptions
from deepinfer_specdec.errors import CalibrationError, SpecDecodeError
from deepinfer_specdec.scheduling.calibration import TemperatureScaling, sigmoid

TRUTH = np.array([2.0, 3.0, 1.5])  # the head is over-confident by these


def rows(count, seed=0):
    """What vLLM reports of `count` blocks: sigmoids of the head, all verified, accepted as TRUTH has it."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.5, 2.5, (count, 3))
    held = rng.random((count, 3)) < sigmoid(logits / TRUTH)
    accepted = np.cumprod(held, axis=1).sum(axis=1)
    return np.column_stack([sigmoid(logits), np.full(count, 3), accepted]).astype(np.float32)


def test_temperatures_are_found_and_saved_for_the_next_run(tmp_path):
    file = tmp_path / "sts.json"
    learning = Calibrator(3, VerificationOptions(refit_every=4000, save_temperatures=str(file)))
    assert learning.temperatures == [1.0, 1.0, 1.0]
    for part in np.array_split(rows(4096), 64):
        learning.observe(part)
    learning.join()
    assert learning.fits == 1
    # 4,000 blocks place a temperature that minimises a binned error within a third of the truth.
    assert np.abs(np.log(learning.temperatures / TRUTH)).max() < np.log(4 / 3)
    restarted = Calibrator(3, VerificationOptions(temperatures=str(file), online=False))
    assert restarted.temperatures == learning.temperatures


def test_unverified_blocks_teach_nothing():
    calibrator = Calibrator(3, VerificationOptions(refit_every=10))
    unverified = rows(1000)
    unverified[:, 3:] = 0
    calibrator.observe(unverified)
    calibrator.join()
    assert calibrator.fits == 0


def test_offline_keeps_the_file():
    calibrator = Calibrator(3, VerificationOptions(online=False, refit_every=10))
    calibrator.observe(rows(1000))
    calibrator.join()
    assert calibrator.temperatures == [1.0, 1.0, 1.0]


def test_a_head_that_is_sure_beyond_float32_is_no_trouble():
    sure = rows(4096)
    sure[:200, :3] = 1.0
    sure[200:300, :3] = 0.0
    calibrator = Calibrator(3, VerificationOptions(refit_every=4000))
    calibrator.observe(sure)
    calibrator.join()
    assert np.isfinite(calibrator.temperatures).all()


def test_a_file_for_shorter_drafts_or_of_something_else_is_refused(tmp_path):
    file = tmp_path / "sts.json"
    TemperatureScaling(np.array([1.0, 2.0])).save(file)
    with pytest.raises(CalibrationError, match="2 temperatures; allowed: at least 3"):
        Calibrator(3, VerificationOptions(temperatures=str(file)))
    TemperatureScaling(np.ones(3), np.array([0.0, 0.5, 0.0])).save(file)
    with pytest.raises(CalibrationError, match="has offsets; allowed: temperatures alone"):
        Calibrator(3, VerificationOptions(temperatures=str(file)))
    file.write_text(json.dumps([1, 2, 3]))
    with pytest.raises(CalibrationError, match="temperatures"):
        Calibrator(3, VerificationOptions(temperatures=str(file)))


def test_options_come_from_vllms_additional_config_and_are_checked():
    assert VerificationOptions.read({}) == VerificationOptions.read({"other": 1}) == VerificationOptions()
    assert VerificationOptions.read({"deepinfer_specdec": {"edge": 0.1}}).edge == 0.1
    with pytest.raises(SpecDecodeError, match=r"temperature'.*allowed.*temperatures"):
        VerificationOptions.read({"deepinfer_specdec": {"temperature": "sts.json"}})
    with pytest.raises(SpecDecodeError, match="publish_every 0; allowed: >= 1"):
        VerificationOptions.read({"deepinfer_specdec": {"publish_every": 0}})
    with pytest.raises(SpecDecodeError, match="edge -1"):
        VerificationOptions.read({"deepinfer_specdec": {"edge": -1}})
