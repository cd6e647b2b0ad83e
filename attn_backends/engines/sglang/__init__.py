"""Draft backends for SGLang, which finds them through the entry point group sglang.srt.plugins.

SGLang calls `register` once in each of its processes. The one thing that SGLang does not let a plug-in extend is the
table of backends that can decode a draft: a hook around its look-up method adds this library's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from attn_backends.engines.sglang.version import unsupported_reason

ENTRY_POINT_GROUP = "sglang.srt.plugins"
"""The group that SGLang calls in every process."""


class Name(NamedTuple):
    """A backend name for SGLang drafts. backend: decodes the draft; sglang: SGLang's backend for the rest."""

    backend: str
    sglang: str


NAMES = {
    "attn_backends_triton_paged": Name(backend="triton_paged", sglang="triton"),
    "attn_backends_flash_attn3": Name(backend="flash_attn3", sglang="fa3"),
}
LOOK_UP = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
"""The method that is hooked."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the names with SGLang. On an unsupported release, SGLang starts without them, with a warning."""
    if reason := unsupported_reason():
        _log.warning("%s", reason)
        return
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_draft_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, (_, sglang) in NAMES.items():
        # A draft's runner makes this one for itself, before the factory makes the backends of its steps.
        ATTENTION_BACKENDS.setdefault(name, ATTENTION_BACKENDS[sglang])
    add_attention_backend_choices(list(NAMES))
    add_draft_attention_backend_choices(list(NAMES))
    HookRegistry.register(LOOK_UP, look_up, HookType.AROUND)


def look_up(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: Mapping[str, Callable[[], tuple[str, Any]]],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """Run SGLang's look-up of a draft's backend, with this library's added.

    backend_map: the factory of each SGLang backend, by name. stamps_children: whether to return a container with one
    backend per step, instead of the backend of the step that reads the prompt. Raises UnsupportedDraft if this
    library's backend cannot serve the draft.
    """
    added = {
        name: _maker(factory, each) if stamps_children else backend_map[each.sglang]
        for name, each in NAMES.items()
        if each.sglang in backend_map
    }
    return original(factory, backend_name, {**backend_map, **added}, error_template, stamps_children=stamps_children)


def _maker(factory: Any, name: Name) -> Callable[[], tuple[str, Any]]:
    def make() -> tuple[str, Any]:
        draft_steps = import_module("attn_backends.engines.sglang.v0_5_23.draft_steps")
        steps = draft_steps.DraftSteps.of(
            name.backend, factory.draft_model_runner, topk=factory.topk, num_steps=factory.speculative_num_steps
        )
        return name.sglang, steps

    return make
