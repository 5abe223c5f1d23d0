"""Which vLLM this adapter serves and the two names it replaces there: the only file that knows vLLM's layout."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SUPPORTED = "0.33."

# vLLM has no registry of verification policies: its model runner calls `maybe_create_adaptive_verification_manager`, which
# checks the configuration and then builds the class that its module calls by this name. The name is the seam.
MODULE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
MANAGER = "AdaptiveVerificationManager"
FACTORY = "maybe_create_adaptive_verification_manager"
ADMISSION = "_assign_draft_token_budget_compiled"

# What the subclass overrides or calls, with the arguments it counts on.
METHODS = {
    "__init__": ("req_states", "query_start_loc", "num_bonus_tokens", "max_total_logits"),
    "add_request": ("req_idx",),
    "set_cost_curves": ("draft_curve", "verify_curve"),
    "record_confidences": ("confidence_probs", "input_batch"),
    "get_num_tokens": ("num_tokens_per_req", "draft_tokens"),
    "reallocate_drafts": ("req_ids", "idx_mapping"),
}

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
        method = getattr(manager, name, None)
        known = inspect.signature(method).parameters if method is not None else {}
        found[f"{MANAGER}.{name}({', '.join(arguments)})"] = set(arguments) <= set(known)
    return found


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
