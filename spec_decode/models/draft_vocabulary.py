"""A draft's tokens beside its target's: rows of padding that only one of them has, tokens that a draft leaves out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_decode.model_api import TargetModel
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.checkpoints.token_map import read_token_map

HEAD = "lm_head.weight"
_UNPROVEN = (
    "they can differ in rows of padding only, and nothing shows that both have the same tokens. Use a draft trained on "
    "this target; if it has the target's tokenizer, put the tokenizer's files into its folder. load_draft also needs "
    "target_folder."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftVocabulary:
    """The vocabulary of a draft that reads and proposes its target's ids.

    known      the ids that have a meaning to the draft: 0 to known - 1. Its mask token is one of them
    embedded   rows of its own embedding: every id of the target has one, of zeros if the checkpoint has none
    scored     the tokens that its logits score
    token_map  int64 [scored], the target's id of each; None: they are the target's
    """

    known: int
    embedded: int
    scored: int
    token_map: torch.Tensor | None


def read_vocabulary(
    store: TensorStore,
    target: TargetModel,
    vocab_size: int,
    device: torch.device,
    *,
    embedding: str = "embed_tokens.weight",
    has_head: bool | None = None,
) -> DraftVocabulary:
    """Read the vocabulary of a draft whose config.json has this vocab_size, and fit its tensors to the target's.

    From then on, the store's tensors of vocab_size rows can be taken with the target's rows.

    embedding  its name in the checkpoint, which may lack it
    has_head   whether the draft scores tokens with its own weights; None: the checkpoint says. A draft without a head
               that is tied to its embedding, or that leaves out tokens, gets rows of the embedding or of the target's
               output projection as its own; any other uses the target's head

    Raises CheckpointError for another vocabulary than the target's, unless the store has `same_tokens`.
    """
    if vocab_size != target.vocab_size and not store.same_tokens:
        raise CheckpointError(
            f"{store.folder} has vocab_size {vocab_size}, the target {target.vocab_size}; {_UNPROVEN}"
        )
    store.fit_rows(vocab_size)
    known = min(vocab_size, target.vocab_size)
    draft_vocab = store.config.get("draft_vocab_size", int, vocab_size)
    token_map = read_token_map(store, draft_vocab, vocab_size, known, device)
    owns = embedding in store.names()
    if has_head is None:
        has_head = _find_head(store, target, token_map, known, embedding if owns else None)
    scored = known if token_map is None else len(token_map)
    if not has_head:
        scored = target.vocab_size
    elif token_map is None and known < target.vocab_size:
        token_map = torch.arange(known, device=device)
    return DraftVocabulary(
        known=vocab_size if owns else known,
        embedded=max(vocab_size, target.vocab_size),
        scored=scored,
        token_map=token_map,
    )


def _find_head(
    store: TensorStore, target: TargetModel, token_map: torch.Tensor | None, known: int, embedding: str | None
) -> bool:
    """Return whether the draft has a head, after giving the store one that the checkpoint only implies."""
    if HEAD in store.names():
        return True
    tied = embedding is not None and store.config.get("tie_word_embeddings", bool, False)
    if not tied and token_map is None:
        return False
    source = store.peek(embedding) if tied and embedding is not None else target.output_projection
    if source is None:
        raise CheckpointError(
            f"{store.folder} has a d2t and no {HEAD}, so its head would be rows of the target's, and this target's "
            f"logits are more than a product with them. Add {HEAD} to the draft."
        )
    store.provide(HEAD, source[:known] if token_map is None else source[token_map.to(source.device)])
    return True
