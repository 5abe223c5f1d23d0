"""Which vLLM this adapter serves, the names it replaces there and the call it wraps: the only file that knows vLLM's layout."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

SUPPORTED = "0.33."

# vLLM has no registry of verification policies: its model runner calls `maybe_create_adaptive_verification_manager`, which
# checks the configuration and then builds the class that its module calls by this name. The name is the seam.
MODULE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
MANAGER = "AdaptiveVerificationManager"
FACTORY = "maybe_create_adaptive_verification_manager"
ADMISSION = "_assign_draft_token_budget_compiled"

# vLLM's scheduler may say that nobody can use the drafts proposed after a step. Its runner then agrees on it with the other
# ranks, tells the drafter to propose none (which keeps its context up to date) and puts -1 in the drafts' place.
RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
RUNNER = "GPUModelRunner"
STATE = "ExecuteModelState"
PROPOSED = "num_spec_tokens_to_schedule"
OUTPUT_MODULE = "vllm.v1.core.sched.output"
OUTPUT = "SchedulerOutput"
SKIP = "skip_drafts"
RUNNER_ATTRIBUTES = ("adaptive_verification", "execute_model_state", "speculator")
BATCH_MODULE = "vllm.v1.worker.gpu.input_batch"
BATCH = "InputBatch"
BATCH_FIELDS = (
    "idx_mapping", "idx_mapping_np", "num_reqs", "num_tokens", "num_scheduled_tokens", "num_computed_tokens_np",
    "num_draft_tokens", "num_draft_tokens_per_req", "prefill_len_np",
)  # fmt: skip
SPECULATOR_MODULE = "vllm.v1.worker.gpu.spec_decode.dflash.speculator"
SPECULATOR = "DFlashSpeculator"

# What the subclass overrides or calls, with the arguments it counts on.
METHODS = {
    "__init__": (
        "req_states",
        "query_start_loc",
        "num_bonus_tokens",
        "max_total_logits",
        "copy_admitted_drafts_to_host",
    ),
    "add_request": ("req_idx",),
    "set_cost_curves": ("draft_curve", "verify_curve"),
    "record_confidences": ("confidence_probs", "input_batch"),
    "get_num_tokens": ("num_tokens_per_req", "draft_tokens"),
    "reallocate_drafts": ("req_ids", "idx_mapping"),
}

ATTRIBUTES = (
    "_batch_budget", "_batch_draft_capacity", "_confidence_probs", "_copy_admitted_drafts_to_host", "_cudagraph_limit",
    "_max_total_logits", "_stale_confidences", "_stale_idx", "req_states", "query_start_loc", "num_bonus_tokens",
    "num_speculative_steps",
)  # fmt: skip

_stock: dict[str, Any] = {}  # vLLM's own, while ours are in place


def installed_version() -> str | None:
    """The version of vLLM here, or None where there is none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def require_supported() -> None:
    """Raise ImportError with what to do where vLLM is not installed, or not the one this adapter is tested with."""
    installed = installed_version()
    if installed is None:
        raise ImportError(
            "deepinfer-specdec's adapter runs inside vLLM, which is not installed: pip install vllm==0.33.0"
        )
    if not installed.startswith(SUPPORTED):
        raise ImportError(
            f"deepinfer-specdec's adapter is written for vLLM {SUPPORTED}x and vLLM {installed} is installed: "
            "leave deepinfer_specdec out of vLLM's options, or install vllm==0.33.0"
        )


def require_seam() -> None:
    """Raise ImportError naming what the installed vLLM lacks of what the adapter replaces. Imports vLLM's worker code."""
    missing = [name for name, found in probe().items() if not found]
    if missing:
        raise ImportError(
            f"deepinfer-specdec finds no {', '.join(missing)} in this vLLM {version('vllm')}: "
            "leave --worker-extension-cls out, or install vllm==0.33.0 unmodified"
        )


def probe() -> dict[str, bool]:
    """Look for every name that the adapter touches, and for the arguments it counts on."""
    module = importlib.import_module(MODULE)
    manager = _stock.get(MANAGER, getattr(module, MANAGER, None))
    found = {f"{MODULE}.{name}": hasattr(module, name) for name in (MANAGER, FACTORY, ADMISSION)}
    for name, arguments in METHODS.items():
        found[f"{MANAGER}.{name}({', '.join(arguments)})"] = _takes(getattr(manager, name, None), *arguments)
    found |= {f"{MANAGER}.{name}": name in _set_by(manager) for name in ATTRIBUTES}
    return found | _probe_runner()


def _probe_runner() -> dict[str, bool]:
    """Look for what lets a step skip its drafts, and tells about a step that ran."""
    runner, state = _attribute(RUNNER_MODULE, RUNNER), _attribute(RUNNER_MODULE, STATE)
    output, batch = _attribute(OUTPUT_MODULE, OUTPUT), _attribute(BATCH_MODULE, BATCH)
    speculator = _attribute(SPECULATOR_MODULE, SPECULATOR)
    return {
        f"{RUNNER}.execute_model(scheduler_output, dummy_run)": _takes(
            getattr(runner, "execute_model", None), "scheduler_output", "dummy_run"
        ),
        **{f"{RUNNER}.{name}": name in _set_by(runner) for name in RUNNER_ATTRIBUTES},
        f"{OUTPUT}.{SKIP}": SKIP in _fields(output),
        f"{STATE}.{PROPOSED}": PROPOSED in getattr(state, "_fields", ()),
        **{f"{BATCH}.{name}": name in _fields(batch) for name in BATCH_FIELDS},
        f"{SPECULATOR}.propose(num_speculative_tokens)": _takes(
            getattr(speculator, "propose", None), "num_speculative_tokens"
        ),
    }


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name, None)


def _takes(function: Any, *arguments: str) -> bool:
    return function is not None and set(arguments) <= set(inspect.signature(function).parameters)


def _fields(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)} if is_dataclass(kind) else set()


def _set_by(kind: Any) -> tuple[str, ...]:
    """Names that the constructor of `kind` mentions, those of its attributes among them."""
    return inspect.unwrap(kind.__init__).__code__.co_names if inspect.isclass(kind) else ()


def replace_manager(manager: type, admission: Any) -> None:
    """Make vLLM build `manager` for adaptive verification and rank drafts with `admission`. Repeating it is harmless."""
    module = importlib.import_module(MODULE)
    for name, ours in ((MANAGER, manager), (ADMISSION, admission)):
        _stock.setdefault(name, getattr(module, name))
        setattr(module, name, ours)


def restore_manager() -> None:
    """Give vLLM back what `replace_manager` took."""
    module = importlib.import_module(MODULE)
    while _stock:
        setattr(module, *_stock.popitem())


class Drafting(Protocol):
    """What decides about a runner's steps (`adapters.vllm.drafting`)."""

    wanted: bool
    now: bool


def let_steps_skip_drafts(runner: Any) -> None:
    """Make `runner` ask its verification manager's `drafting` before each step whether to draft.

    Only with a drafter whose `propose` is DFlash's, as DSpark's is: its steps without drafts were read and tested. vLLM's
    dummy steps stay as they are: a data-parallel rank without requests runs one, and then every rank drafts.
    """
    if not isinstance(runner, _attribute(RUNNER_MODULE, RUNNER)):
        return
    execute = runner.execute_model
    propose = _attribute(SPECULATOR_MODULE, SPECULATOR).propose

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafting: Drafting | None = getattr(runner.adaptive_verification, "drafting", None)
        if drafting is None or kwargs.get("dummy_run"):
            return execute(scheduler_output, *args, **kwargs)
        if not drafting.wanted and getattr(type(runner.speculator), "propose", None) is propose:
            scheduler_output = replace(scheduler_output, **{SKIP: True})
        result = execute(scheduler_output, *args, **kwargs)
        if runner.execute_model_state is not None:  # else nothing ran
            drafting.now = getattr(runner.execute_model_state, PROPOSED) > 0
        return result

    runner.execute_model = execute_model


def let_steps_be(runner: Any) -> None:
    """Undo `let_steps_skip_drafts`."""
    vars(runner).pop("execute_model", None)
