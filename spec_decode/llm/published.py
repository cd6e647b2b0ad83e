"""A target and its draft as they are published, each in a folder, with the target's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spec_decode.llm.pair import Message, Pair
from spec_decode.models import CheckpointError
from spec_decode.models.load import aux_hidden_state_layers, load_draft


def load_published_pair(target: Path, draft: Path | None, *, dtype: torch.dtype, device: torch.device) -> Pair:
    """Load both folders, or the target's alone. The target hands out the states that the draft says it reads.

    Raises CheckpointError for what is wrong in a folder or between the two, and without `transformers`.
    """
    try:
        from spec_decode.models.hf.folder import load_model, load_tokenizer
        from spec_decode.models.hf.target import TransformersTarget
    except ImportError as error:
        raise CheckpointError(str(error)) from error
    tokenizer = load_tokenizer(target)
    if draft is not None and (draft / "tokenizer_config.json").is_file():
        _check_same_tokens(tokenizer, load_tokenizer(draft), target, draft)
    model = load_model(target, dtype=dtype, device=device)
    num_layers = model.config.get_text_config().num_hidden_layers
    layers = None if draft is None else aux_hidden_state_layers(draft, num_layers)
    wrapped = TransformersTarget(model, aux_hidden_state_layers=layers)
    if len(tokenizer) > wrapped.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {target} has {len(tokenizer)} tokens, the model beside it {wrapped.vocab_size}. Use the "
            "tokenizer that the model was trained with."
        )
    return Pair(
        wrapped,
        None if draft is None else load_draft(draft, wrapped, dtype=dtype, device=device),
        _stop_ids(model.generation_config, tokenizer, wrapped.vocab_size),
        partial(_encode, tokenizer),
        lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True)),
        partial(_encode_chat, tokenizer) if tokenizer.chat_template else None,
    )


def _stop_ids(config: Any, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """The tokens that end a text, by the target's generation_config.json and by its tokenizer. Either may name one that
    the model does not have, -1 for example."""
    ends = getattr(config, "eos_token_id", None)
    listed = ends if isinstance(ends, list | tuple) else [ends]
    return frozenset(end for end in (*listed, tokenizer.eos_token_id) if end is not None and 0 <= end < vocab_size)


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text)
    if not ids:
        raise CheckpointError(f"the prompt {text!r:.200} has no token. Write something.")
    return ids


def _encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # a template is a program of the model's author, and may raise anything
        raise CheckpointError(f"the model's chat template refuses this conversation: {error}. Mend it.") from error
    return ids


def _check_same_tokens(ours: Any, drafts: Any, target: Path, draft: Path) -> None:
    theirs = drafts.get_vocab()
    differing = sorted((i, token) for token, i in ours.get_vocab().items() if theirs.get(token) != i)
    if differing:
        number, token = differing[0]
        raise CheckpointError(
            f"{len(differing)} of {len(ours)} tokens have other numbers in the draft: {token!r} is {number} in "
            f"{target} and {theirs.get(token, 'no token')} in {draft}. Use a draft made for this target."
        )
