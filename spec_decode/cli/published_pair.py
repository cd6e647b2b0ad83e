"""A target and its draft as they are published, each in a folder, and the target's tokenizer between them and text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from spec_decode.cli.byte_pair import Pair
from spec_decode.cli.output import UserError
from spec_decode.models.load import aux_hidden_state_layers, load_draft


def load_published_pair(
    target: Path, draft: Path, *, dtype: torch.dtype, device: torch.device, chat: bool = False
) -> Pair:
    """Load both folders. The target hands out the states that the draft says it reads; with `chat`, a prompt opens a
    conversation, by the model's template.

    Raises CheckpointError for what is amiss in a folder, or between the two, and UserError without `transformers`.
    """
    try:
        from spec_decode.models.hf.folder import load_model, load_tokenizer
        from spec_decode.models.hf.target import TransformersTarget
    except ImportError as error:
        raise UserError(str(error)) from error
    tokenizer = load_tokenizer(target)
    if chat and not tokenizer.chat_template:
        raise UserError(
            "a chat needs a chat template, the target's tokenizer has none; nothing was loaded. Give the prompts as "
            "plain text, or use a model that was trained to chat."
        )
    if (draft / "tokenizer_config.json").is_file():
        _check_same_tokens(tokenizer, load_tokenizer(draft), target, draft)
    model = load_model(target, dtype=dtype, device=device)
    wrapped = TransformersTarget(
        model, aux_hidden_state_layers=aux_hidden_state_layers(draft, model.config.get_text_config().num_hidden_layers)
    )
    if len(tokenizer) > wrapped.vocab_size:
        raise UserError(
            f"the tokenizer in {target} has {len(tokenizer)} tokens, the model beside it knows {wrapped.vocab_size}; "
            "some texts could not be read, so nothing was run. Use the tokenizer that the model was trained with."
        )
    return Pair(
        wrapped,
        load_draft(draft, wrapped, dtype=dtype, device=device),
        _stop_ids(model.generation_config, tokenizer),
        partial(_encode, tokenizer, chat),
        lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True)),
    )


def _stop_ids(config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text, by the target's generation_config.json and by its tokenizer."""
    ends = getattr(config, "eos_token_id", None)
    listed = ends if isinstance(ends, list | tuple) else [ends]
    return frozenset(end for end in (*listed, tokenizer.eos_token_id) if end is not None)


def _encode(tokenizer: Any, chat: bool, text: str) -> list[int]:
    turns = [{"role": "user", "content": text}]
    ids: list[int] = (
        tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        if chat
        else tokenizer.encode(text)
    )
    if not ids:
        raise UserError(f"a prompt must have a token, {text!r} has none; nothing was run. Write something.")
    return ids


def _check_same_tokens(ours: Any, drafts: Any, target: Path, draft: Path) -> None:
    theirs = drafts.get_vocab()
    differing = sorted((i, token) for token, i in ours.get_vocab().items() if theirs.get(token) != i)
    if differing:
        number, token = differing[0]
        raise UserError(
            f"target and draft must number their tokens alike, {len(differing)} of {len(ours)} differ: {token!r} is "
            f"{number} in {target} and {theirs.get(token, 'no token')} in {draft}; hardly a draft would be kept, so "
            "nothing was run. Use a draft made for this target."
        )
