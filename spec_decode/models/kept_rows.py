"""A draft that stops computing for tokens whose keys and values are all that is wanted of them."""

from __future__ import annotations

from abc import abstractmethod

import torch

from spec_decode.models.attention import Attention
from spec_decode.models.base import DraftModel, KeepRows


class KeptRowsDraft(DraftModel):
    """Its last layer leaves tokens out after its attention; a subclass has `states` in place of `forward`."""

    @abstractmethod
    def states(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        keep: KeepRows | None,
    ) -> torch.Tensor:
        """`forward` [T, H], or with `keep` the states [R, H] of the tokens that it keeps."""

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """States [T, H]; token_ids, positions int64 [T], hidden [T, H]."""
        return self.states(token_ids, hidden, positions, attention, None)

    def forward_kept(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        keep: KeepRows,
    ) -> torch.Tensor:
        """See the base."""
        return self.states(token_ids, hidden, positions, attention, keep)
