"""Draft backends for SGLang, found by it through the entry point group sglang.srt.plugins.

SGLang calls `register` once in each of its processes. What SGLang itself does not offer a plug-in is one table, of the
backends that can decode a draft: a hook around the method that looks a backend up there adds ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from engines.sglang.version import unsupported_reason

ENTRY_POINT_GROUP = "sglang.srt.plugins"
"""Of the packages that SGLang calls in every process."""


class Name(NamedTuple):
    """A name that SGLang takes for a draft's backend. ours: who decodes the draft; theirs: who does all else."""

    ours: str
    theirs: str


NAMES = {
    "attn_backends_triton_paged": Name(ours="triton_paged", theirs="triton"),
    "attn_backends_flash_attn3": Name(ours="flash_attn3", theirs="fa3"),
}
LOOK_UP = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
"""The method that is hooked."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Tell SGLang the names. On another release than the adapters are for it starts without them, with a warning."""
    if reason := unsupported_reason():
        _log.warning("%s", reason)
        return
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_draft_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, (_, theirs) in NAMES.items():
        # What a draft's runner makes for itself, before the factory makes the backends of its steps.
        ATTENTION_BACKENDS.setdefault(name, ATTENTION_BACKENDS[theirs])
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
    """SGLang's look-up of a draft's backend, with ours among those it finds.

    backend_map: what makes each of SGLang's, by name. stamps_children: whether a container of a backend for each step
    is asked for, not the backend of the step that reads the text. Raises UnsupportedDraft where ours cannot serve the
    draft.
    """
    ours = {
        name: _maker(factory, each) if stamps_children else backend_map[each.theirs]
        for name, each in NAMES.items()
        if each.theirs in backend_map
    }
    return original(factory, backend_name, {**backend_map, **ours}, error_template, stamps_children=stamps_children)


def _maker(factory: Any, name: Name) -> Callable[[], tuple[str, Any]]:
    def make() -> tuple[str, Any]:
        draft_steps = import_module("engines.sglang.v0_5_23.draft_steps")
        made = draft_steps.DraftSteps.of(
            name.ours, factory.draft_model_runner, topk=factory.topk, num_steps=factory.speculative_num_steps
        )
        return name.theirs, made

    return make
