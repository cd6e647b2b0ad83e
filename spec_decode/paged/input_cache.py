"""What step 0 read at every slot of a KV group, for a round that begins before its own tokens."""

from __future__ import annotations

import torch

from builders import NO_SLOT
from spec_decode.paged.kv_groups import KVGroup

_FIRST_SLOT = -NO_SLOT
"""The line of slot 0: line 0 takes what has no slot."""


class InputCache:
    """A token and the target's states for every slot, beside the KV of the same slots.

    So it needs no rows: it holds for a request wherever that runs, after a prefill, in another row or anew.

    token_ids  int64 [1 + slots]
    states     [1 + slots, F]
    """

    def __init__(self, group: KVGroup, states_size: int, dtype: torch.dtype, device: torch.device) -> None:
        pages = min(cache.num_pages for cache in group.caches.values())
        lines = _FIRST_SLOT + pages * group.spec.page_size
        self.token_ids = torch.zeros(lines, dtype=torch.int64, device=device)
        self.states = torch.zeros(lines, states_size, dtype=dtype, device=device)

    def store(self, slots: torch.Tensor, token_ids: torch.Tensor, states: torch.Tensor) -> None:
        """Keep token_ids int64 [T] and states [T, F] at slots int64 [T], where these are slots."""
        lines = slots + _FIRST_SLOT
        self.token_ids.index_copy_(0, lines, token_ids)
        self.states.index_copy_(0, lines, states)

    def load(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of what was kept at slots int64 [T]; of what is no slot, anything finite."""
        lines = slots + _FIRST_SLOT
        return self.token_ids.index_select(0, lines), self.states.index_select(0, lines)
