"""Attention backends for vLLM, which finds them through the entry point group vllm.general_plugins.

vLLM calls `register` in each of its processes, possibly more than once. It imports a backend's module when it needs the
backend; on another vLLM minor, or without the package of its kernels, the import fails with the reason.
"""

from __future__ import annotations

import copyreg
import logging
import os
from collections.abc import Callable
from typing import Any

from attn_backends.engines.vllm.compat import registry
from attn_backends.engines.vllm.names import DRAFT_HEAD
from attn_backends.engines.vllm.names import NAMES as NAMES

ENTRY_POINT_GROUP = "vllm.general_plugins"
"""The group that vLLM calls in every process."""
VALIDATE = "ATTN_BACKENDS_VALIDATE"
"""The variable that makes a served vLLM compare its draft metadata: 1 for yes, 0 for no."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the names with vLLM. If vLLM has no free names, or one is taken, it starts without them, with a warning.

    Raises ValueError for a wrong VALIDATE or DRAFT_HEAD, and UnsupportedVllm if one is set and this vLLM differs.
    """
    if reason := refused_variable():
        raise ValueError(reason)
    if os.environ.get(VALIDATE) == "1":
        from attn_backends.engines.vllm import state_validator, validator

        validator.install()
        state_validator.install()
    _register_names()
    _register_quantizations()
    if value := os.environ.get(DRAFT_HEAD):
        from attn_backends.engines.vllm import draft_heads

        draft_heads.register(value)


def refused_variable() -> str:
    """Return what is wrong with VALIDATE or DRAFT_HEAD, and what to do; empty if nothing is."""
    if (value := os.environ.get(VALIDATE, "0")) not in ("0", "1"):
        return f"{VALIDATE} must be 0 or 1, got {value!r}. Set it to 1 to compare draft metadata."
    if choice := os.environ.get(DRAFT_HEAD):
        from attn_backends.engines.vllm.head_choice import HeadChoice

        try:
            HeadChoice.of(choice)
        except ValueError as error:
            return str(error)
    return ""


def _register_names() -> None:
    if (found := registry()) is None:
        _log.warning("attn-backends needs a vLLM with free backend names, such as 0.33; it registered none.")
        return
    backends, register_backend = found
    for name, path in NAMES.items():
        if name not in backends.__members__:
            register_backend(name, path)
        elif (existing := backends[name].get_path()) != path:
            _log.warning("vLLM's backend %s is already %s, that of attn-backends was skipped.", name, existing)
    # A process that vLLM spawns, as `vllm serve` does, reads its configuration before it loads plug-ins, and an enum
    # member is pickled by a value that only plug-ins make valid.
    copyreg.pickle(backends, _reduced)


def _register_quantizations() -> None:
    """Register our names for `quantization`, and check where they are used. Another vLLM starts without them, with a
    warning."""
    try:
        from attn_backends.engines.vllm import engine_config
        from attn_backends.engines.vllm.compat import register_quantization_config
        from attn_backends.engines.vllm.quantization import CONFIGS
    except ImportError as error:
        _log.warning("attn-backends registered no quantization: %s", error)
        return
    for config in CONFIGS:
        register_quantization_config(config.name)(config)
    engine_config.install()


def _reduced(member: Any) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Reduce a member of vLLM's AttentionBackendEnum for pickling."""
    is_ours = NAMES.get(member.name) == member.value
    return (_named, (member.name,)) if is_ours else (type(member), (member.value,))


def _named(name: str) -> Any:
    """Return the member of one of NAMES, in a process that may not have loaded plug-ins."""
    _register_names()
    found = registry()
    assert found is not None  # the process that pickled it had one
    return found[0][name]
