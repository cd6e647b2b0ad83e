"""The reduced vocabulary of a draft: the target token that each of its tokens stands for."""

from __future__ import annotations

import torch

from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore


def read_token_map(
    store: TensorStore, draft_vocab: int, own_vocab: int, target_vocab: int, device: torch.device
) -> torch.Tensor | None:
    """Return each draft token's id in the target, int64 [draft_vocab], distinct; None if draft_vocab is own_vocab, the
    vocab_size of config.json, and the checkpoint has no map.

    target_vocab: ids that both have. d2t holds each token's offset to its id in the target. t2d, which is optional,
    marks the mapped ids of own_vocab. Ids need not ascend. Raises CheckpointError for invalid maps and for maps that
    disagree.
    """
    if draft_vocab == own_vocab and "d2t" not in store.names():
        return None
    ids = store.take("d2t", (draft_vocab,), torch.int64) + torch.arange(draft_vocab)
    problems = _problems(ids, target_vocab)
    if not problems and "t2d" in store.names():
        problems = _disagreements(ids, store.take("t2d", (own_vocab,), torch.bool))
    if problems:
        raise CheckpointError(
            f"d2t in {store.folder} must map {draft_vocab} draft tokens to distinct ones of the target's "
            f"{target_vocab}: {'; '.join(problems)}. Restore the checkpoint."
        )
    return ids.to(device)


def _problems(ids: torch.Tensor, target_vocab: int) -> list[str]:
    outside = (ids < 0) | (ids >= target_vocab)
    if count := int(outside.sum()):
        first = int(outside.nonzero()[0])
        return [f"{count} map outside the target's vocabulary, first {first} to {int(ids[first])}"]
    uses = torch.bincount(ids, minlength=target_vocab)
    if count := int((uses > 1).sum()):
        first = int((uses > 1).nonzero()[0])
        return [f"{count} of the target's are mapped to repeatedly, first {first}, {int(uses[first])} times"]
    return []


def _disagreements(ids: torch.Tensor, marked: torch.Tensor) -> list[str]:
    if (count := int(marked.sum())) != len(ids):
        return [f"t2d marks {count} tokens, not {len(ids)}"]
    unmarked = ids[~marked[ids]]
    if len(unmarked):
        return [f"t2d does not mark {len(unmarked)} that d2t maps to, first {int(unmarked[0])}"]
    return []
