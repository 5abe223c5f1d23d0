"""What a vLLM user may set: `--additional-config '{"deepinfer_specdec": {...}}'`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from deepinfer_specdec.errors import SpecDecodeError

SECTION = "deepinfer_specdec"


@dataclass(frozen=True, slots=True)
class VerificationOptions:
    """How vLLM's adaptive verification is driven.

    Attributes:
        temperatures: file that `TemperatureScaling.save` wrote, to start from; "" starts with the head as it is.
        online: refit the temperatures while serving, from the verified blocks.
        save_temperatures: file to write every refit to, for the next run's `temperatures`; "" for none.
        refit_every: verified blocks between two fits.
        publish_every: steps between two updates of prices and temperatures (all ranks take them in the same step).
        log_every: seconds between two lines of statistics; 0 for none.
        edge: share by which verifying drafts must beat plain decoding.
        pause_drafting: leave the drafter's block out of steps while drafts do not pay.
        look_share: of the time, that may be lost to looks whether they pay by now, and to stopping late.
    """

    temperatures: str = ""
    online: bool = True
    save_temperatures: str = ""
    refit_every: int = 2048
    publish_every: int = 128
    log_every: float = 60.0
    edge: float = 0.0
    pause_drafting: bool = True
    look_share: float = 0.01

    def __post_init__(self) -> None:
        for name in ("refit_every", "publish_every"):
            if getattr(self, name) < 1:
                raise SpecDecodeError(f"{SECTION}.{name} {getattr(self, name)}; allowed: >= 1")
        for name in ("log_every", "edge"):
            if not getattr(self, name) >= 0.0:
                raise SpecDecodeError(f"{SECTION}.{name} {getattr(self, name)}; allowed: >= 0")
        if not 0.0 < self.look_share < 1.0:
            raise SpecDecodeError(f"{SECTION}.look_share {self.look_share}; allowed: between 0 and 1")

    @classmethod
    def read(cls, additional_config: Any) -> VerificationOptions:
        """Read the section of vLLM's `additional_config`, which may lack it. Raises SpecDecodeError on unknown names."""
        section = additional_config.get(SECTION, {}) if isinstance(additional_config, dict) else {}
        known = {field.name for field in fields(cls)}
        if not isinstance(section, dict) or set(section) - known:
            raise SpecDecodeError(f"{SECTION} {section!r}; allowed: an object with {', '.join(sorted(known))}")
        return cls(**section)
