"""Blocks of a draft in whole sequences.

Legend: B sequences, L positions, A blocks per sequence, K masks, H hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_decode.model_api import DraftInputs
from spec_decode.models.dflash import DFlash
from train_pair.attention import BlockAttention, positions_of


class Blocks(NamedTuple):
    """The next token and up to K masks, at A places of each sequence.

    starts     int64 [B, A], the next token's position; the context is everything before it
    lens       int64 [B, A], 1 to K: the number of masks; the rest is padding
    num_masks  K
    """

    starts: torch.Tensor
    lens: torch.Tensor
    num_masks: int


def draw_blocks(tokens: torch.Tensor, count: int, num_masks: int) -> Blocks:
    """Draw `count` blocks of up to `num_masks` masks, anywhere in tokens [B, L] after the first token.

    Their lengths vary, because masks see each other and an engine can request any number of tokens.
    """
    shape, device = (tokens.shape[0], count), tokens.device
    starts = torch.randint(1, tokens.shape[1] - num_masks + 1, shape, device=device)
    return Blocks(starts, torch.randint(1, num_masks + 1, shape, device=device), num_masks)


def run_blocks(draft: DFlash, tokens: torch.Tensor, hidden: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Return the draft's states [B, A, K, H] for the masks. tokens: int64 [B, L]; hidden [B, L, H]: the target's
    states."""
    attention = BlockAttention(blocks.starts, blocks.lens, query_len=1 + blocks.num_masks, context=tokens.shape[1])
    states = draft.combine(hidden.flatten(0, 1))
    draft.write_context(states, positions_of(tokens), attention)
    places = blocks.starts[..., None] + torch.arange(1 + blocks.num_masks, device=tokens.device)
    inputs = torch.full_like(places, draft.mask_token_id)
    inputs[..., 0] = tokens.gather(1, blocks.starts)
    out: torch.Tensor = draft(DraftInputs(inputs.flatten(), states, places.flatten(), attention))
    return out.view(*places.shape, -1)[:, :, 1:]
