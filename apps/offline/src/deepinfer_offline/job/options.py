"""What a user may choose about a job."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_offline.engine.options import EngineOptions, OptionsError
from deepinfer_offline.job.codec import dumps
from deepinfer_offline.job.identity import model_identity

ORDERS = ("prefix", "input")
_STANDARD_OUTPUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How to run a job.

    Attributes:
        input: a path, or `-` for standard input.
        output: where results go. A link is followed once, here: all later paths lie beside the file that it names, so that
            two runs that reach one file by different names meet at one journal.
        engine: how to build the engine.
        order: `prefix` runs requests that share a prompt prefix together; `input` keeps the input's order. OUTPUT is in
            input order either way.
        report: where to write the report, or None.
        retry_errors: answer again the lines that were answered with an error.
        fresh: throw away what an earlier run with this OUTPUT answered.
        quiet: print nothing but errors.
        served_names: further model names that lines may ask for.
        ray: engines on a Ray cluster; 0 runs one engine in this process.

    Raises:
        OptionsError: a value is outside what its option allows.
    """

    input: str
    output: Path
    engine: EngineOptions = field(default_factory=EngineOptions)
    order: str = "prefix"
    report: Path | None = None
    retry_errors: bool = False
    fresh: bool = False
    quiet: bool = False
    served_names: tuple[str, ...] = ()
    ray: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise OptionsError(f"--order {self.order!r} is not one of {', '.join(ORDERS)}")
        if self.ray < 0:
            raise OptionsError(f"--ray must be at least 1, got {self.ray}")
        if self.retry_errors and self.fresh:
            raise OptionsError("--retry-errors keeps good answers and --fresh throws them away; give one of them")
        if str(self.output) in _STANDARD_OUTPUT:
            raise OptionsError(
                "OUTPUT cannot be standard output, because a run that is interrupted goes on in its file"
            )
        if self.output.is_symlink():
            object.__setattr__(self, "output", Path(os.path.realpath(self.output)))

    @property
    def journal(self) -> Path:
        """The journal's place."""
        return self.output.with_name(self.output.name + ".journal")

    def answer_options(self) -> dict[str, str | int]:
        """The options that shape answers, by flag. A job goes on only with the same ones.

        What only changes speed or memory is not among them, so that a run that ran out of memory can go on with less.
        """
        engine = self.engine
        shaping: dict[str, str | int] = {
            "model": model_identity(engine.model),
            "engine": engine.engine,
            "device": engine.device,
        }
        shaping |= {"dtype": engine.dtype, "seed": engine.seed, "max-model-len": engine.max_model_len or 0}
        # vLLM's rejection sampling draws other tokens of the same distribution. The native engine's are those of plain decoding
        # up to rounding whatever is drafted, so `draft_model` is not here: like a batch size, it changes speed alone.
        shaping["speculative"] = engine.speculative
        shaping["window-strategy"] = engine.window_strategy  # approximate windows give other answers than exact ones
        shaping["on-unsupported"] = engine.on_unsupported
        shaping["decoder-replay"] = "on" if engine.decoder_replay else "off"
        return {**shaping, "engine-arg": " ".join(f"{name}={value}" for name, value in engine.engine_args)}

    def fingerprint(self) -> str:
        """16 hex digits that change when an option that shapes answers does."""
        return fingerprint(self.answer_options())

    def names(self) -> tuple[str, ...]:
        """Model names that lines may ask for, besides the engine's own."""
        path = Path(self.engine.model)
        return (self.engine.model, path.name, path.stem if path.suffix == ".gguf" else path.name, *self.served_names)


def fingerprint(answer_options: dict[str, str | int]) -> str:
    """See `JobOptions.fingerprint`."""
    return hashlib.blake2b(dumps(answer_options), digest_size=8).hexdigest()
