"""What vLLM's log says of an update in the graph: vLLM itself names the backends that have none, without reasons."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.logger import init_logger

_log = init_logger("vllm.attn_backends")


def say_update(name: str, reasons: Sequence[str]) -> None:
    """One line for a backend: its draft metadata is updated in the graph, or the reasons why not."""
    if reasons:
        _log.info_once("%s rebuilds draft metadata for every step: %s.", name, "; ".join(reasons))
    else:
        _log.info_once("%s updates draft metadata in the graph.", name)
