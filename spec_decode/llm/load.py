"""Find a model by folder or name, and load it with its draft."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attn_backends.kernels.linear.fp8_weight import reads_fp8
from builders import BatchError
from builders.errors import require
from spec_decode.llm.chat_template import encode_chat
from spec_decode.llm.pair import Pair, encode_utf8, load_byte_pair
from spec_decode.llm.progress import loading_bar
from spec_decode.llm.prompts import Message
from spec_decode.model_api import TargetModel
from spec_decode.models import SHIPPED_PAIR, CheckpointError, draft_names
from spec_decode.models.causal_lm import keeps_states, load_target
from spec_decode.models.checkpoints.files import in_short, require_regular
from spec_decode.models.checkpoints.folder_kind import is_mxfp4
from spec_decode.models.checkpoints.fp8_store import Fp8Store
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.decoder import check_aux_layers
from spec_decode.models.hf.folder import check_model, load_generation_config, load_model, load_tokenizer
from spec_decode.models.hf.token_text import token_text
from spec_decode.models.layer_windows import ARCHITECTURES
from spec_decode.models.load import aux_hidden_state_layers, check_draft, check_same_tokens, load_with_tokens
from spec_decode.models.quantise import quantise_target
from spec_decode.models.target_fields import unserved

if TYPE_CHECKING:
    from spec_decode.models.hf.target import TransformersTarget

Name = str | os.PathLike[str]
_QUANTISED = "read fp8 weights"
_ANY_PAGE = 16
"""A page size, to ask a model for its layers."""


def load(
    model: Name,
    draft: Name | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    runs_in: str | None = None,
    quantises: bool = False,
    invariant: bool = False,
    progress: bool = False,
) -> Pair:
    """Load the model and its draft.

    model: a folder, `pydoc` for this library's own pair, or the name of a model in this machine's Hugging
    Face cache; nothing is downloaded. draft: the same; for a byte-level pair, the name of one of its drafts. runs_in,
    quantises, invariant, progress: as in `load_published_pair`. Raises CheckpointError, and BatchError as it does.
    """
    folder = find(model)
    if draft is not None:
        _require_name(draft, "draft")
    if is_pair(folder):
        if runs_in is not None:
            raise CheckpointError(
                f"target is {runs_in!r}, and {folder} holds a byte-level pair, which only this library computes. Leave "
                "target out."
            )
        if draft is not None and os.fspath(draft) not in (own := draft_names(folder)) and os.path.isdir(draft):
            raise CheckpointError(
                f"{folder} has its own drafts, and {draft} is a folder. Pass one of the names {', '.join(own)}, or the "
                "draft's own target."
            )
        pair = load_byte_pair(folder, dtype, device, draft=None if draft is None else os.fspath(draft))
        if not quantises:
            return pair
        quantise_target(pair.target)
        return replace(pair, target_weights=_QUANTISED)
    found = None if draft is None else find(draft, "draft")
    return load_published_pair(
        folder,
        found,
        dtype=dtype,
        device=device,
        runs_in=runs_in,
        quantises=quantises,
        invariant=invariant,
        progress=progress,
    )


def find(name: Name, what: str = "model") -> Path:
    """Return the folder of a model or a draft. Raises CheckpointError with the places that were searched."""
    _require_name(name, what)
    if os.path.isdir(name):  # unlike Path.is_dir, it raises for no name
        return Path(name)
    if name == SHIPPED_PAIR.name:
        return SHIPPED_PAIR
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(os.fspath(name), local_files_only=True))
    except Exception as error:  # the hub's library has an exception for each way in which a name can be wrong
        raise CheckpointError(
            f"{what} {os.fspath(name)!r:.200} is not a folder, not {SHIPPED_PAIR.name!r}, and not in this machine's "
            f"Hugging Face cache. Nothing is downloaded: pass the folder of the {what}."
        ) from error


def _require_name(name: Name, what: str) -> None:
    if not isinstance(name, str | os.PathLike):
        raise CheckpointError(f"{what} is {name!r}. Pass the path of a folder, or a name.")


def is_pair(folder: Path) -> bool:
    """Return whether a folder holds a target together with its drafts. The shipped pair does, even before it is
    installed: loading it then says how."""
    if folder == SHIPPED_PAIR:
        return True
    try:
        require_regular(folder / "config.json")
        values = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # loading it reports the cause
    return isinstance(values, dict) and "target" in values


def load_published_pair(
    target: Path,
    draft: Path | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    runs_in: str | None = None,
    quantises: bool = False,
    invariant: bool = False,
    progress: bool = False,
) -> Pair:
    """Load both folders, or only the target's. The target returns the hidden states that the draft's config names.

    runs_in: "transformers", or None for this library's layers if they compute the target, else `transformers`.
    quantises: round the weights of the target's products to 8 bits, which needs this library's layers. invariant: the
    target must be able to be batch invariant. progress: show a bar while our layers read a large target, if stderr is a
    terminal.

    Raises CheckpointError for an invalid folder, for a draft of another target, and without `transformers`, and
    BatchError for a target that cannot be batch invariant.
    """
    check_model(target, narrow=runs_in is None)
    store = None if runs_in == "transformers" else Fp8Store.open(target)
    why = "you asked for it" if store is None else unserved(store)
    narrow = isinstance(store, Fp8Store) or (store is not None and is_mxfp4(store.config.values))
    if why is not None and (quantises or narrow):
        raise CheckpointError(
            f"{target} would run in transformers, which gets no quantised weights: {why}. Leave weights out, use a "
            "bf16 copy of a checkpoint in 8 bits, or use a model that this library's layers compute."
        )
    require(
        why is None or not invariant,
        f"batch_invariant is True, and {target} runs in transformers, whose products are not batch invariant: {why}. "
        "Leave batch_invariant out, or use a model that this library's layers compute.",
    )
    require(
        not (invariant and store is not None and keeps_states(store)),
        f"batch_invariant is True, and {target} has recurrent layers, whose blocks of tokens depend on the batch. "
        "Leave batch_invariant out.",
    )
    if isinstance(store, Fp8Store):
        store.keeps = reads_fp8(dtype, device)
    tokenizer, same = load_tokenizer(target), False
    if draft is not None:
        check_draft(draft)
        same = check_same_tokens(draft, target, tokenizer)
    target_model: TargetModel
    runs = "on this library's layers"
    if store is not None and why is None:
        with loading_bar(store.num_bytes, shown=progress) as store.on_read:
            target_model = load_target(store, partial(_states, draft), dtype=dtype, device=device, quantises=quantises)
    else:
        target_model = _in_transformers(target, draft, dtype, device)
        experts = ", its experts in this library's kernels" if target_model.serves_experts else ""
        runs = f"in transformers{experts}: {why}"
        attending = [layer for group in target_model.layer_groups(_ANY_PAGE) for layer in group.layers]
        target_model.kv_scales = (TensorStore.open(target) if store is None else store).kv_scales(attending)
    return Pair(
        target_model,
        None if draft is None else load_with_tokens(draft, target_model, dtype=dtype, device=device, same_tokens=same),
        _stop_ids(load_generation_config(target), tokenizer, target_model.vocab_size),
        tokenizer,
        partial(_encode, tokenizer, target_model.vocab_size),
        token_text(tokenizer),
        partial(_encode_chat, tokenizer, target_model.vocab_size) if tokenizer.chat_template else None,
        _added_tokens(tokenizer, target_model.vocab_size),
        runs,
        _weights(store, quantises=quantises, dtype=dtype),
    )


def _in_transformers(folder: Path, draft: Path | None, dtype: torch.dtype, device: torch.device) -> TransformersTarget:
    """Load a target that runs in transformers. Raises CheckpointError, also for a config.json whose values it takes and
    cannot compute."""
    # Only here: it imports transformers' models, which takes seconds.
    from spec_decode.models.hf.target import TransformersTarget

    model = load_model(folder, dtype=dtype, device=device)
    states = _states(draft, num_layers := model.config.get_text_config().num_hidden_layers)
    check_aux_layers(states, num_layers)
    try:
        return TransformersTarget(model, aux_hidden_state_layers=states)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # from a model's code, which checks no config.json
        problem = str(error)
        if not isinstance(error, CheckpointError):
            problem = f"transformers cannot compute what it describes: {in_short(error)}. Correct the file."
        store = TensorStore.open(folder)
        if (why := unserved(store)) and any(name in ARCHITECTURES for name in store.architectures):
            problem += f" Our layers do not compute it either: {why}; remove or correct that if it is a mistake."
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        raise kind(f"{folder / 'config.json'}: {problem}") from error


def _weights(store: TensorStore | None, *, quantises: bool, dtype: torch.dtype) -> str:
    """Return what the target's products do with 8-bit weights; empty if they are neither stored nor asked for."""
    if not isinstance(store, Fp8Store):
        packed = store is not None and any(name.endswith("_blocks") for name in store.names())
        blocks = " in MXFP4" if packed else ""
        if blocks and not quantises:
            return f"read {str(dtype).removeprefix('torch.')} weights, widened from experts{blocks}"
        return f"{_QUANTISED}{blocks and f', rounded again from experts{blocks}'}" if quantises else ""
    blocks = f" in blocks of {' x '.join(map(str, store.layout.block))}" if store.is_blocked else ""
    if blocks and quantises:
        return f"{_QUANTISED}, rounded again from FP8{blocks}"
    if blocks or not store.keeps:
        return f"read {str(dtype).removeprefix('torch.')} weights, widened from FP8{blocks}"
    return f"{_QUANTISED}, as stored{' where there are any' if quantises else ''}"


def _states(draft: Path | None, num_layers: int) -> tuple[int, ...] | None:
    """Return the states of a target with so many layers that the draft reads. Raises CheckpointError."""
    return None if draft is None else aux_hidden_state_layers(draft, num_layers)


def _stop_ids(config: Any, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Return the tokens that end a text, from the target's generation_config.json and its tokenizer. Either can name a
    token that the model does not have, such as -1. Raises CheckpointError for anything but integers."""
    ends = getattr(config, "eos_token_id", None)
    several = ends if isinstance(ends, list | tuple) else [ends]
    listed = [end for end in (*several, tokenizer.eos_token_id) if end is not None]
    if wrong := [end for end in listed if type(end) is not int]:
        raise CheckpointError(
            f"the target's eos_token_id has {wrong[0]!r:.200}. Write a token id, or a list of them, in its "
            "generation_config.json."
        )
    return frozenset(end for end in listed if 0 <= end < vocab_size)


def _added_tokens(tokenizer: Any, vocab_size: int) -> dict[str, int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: token_id for token_id, token in added.items() if token_id < vocab_size}


def _encode(tokenizer: Any, vocab_size: int, text: str) -> list[int]:
    ids = encode_utf8(tokenizer.encode, text)
    if not ids:
        raise CheckpointError(f"the prompt {text!r:.200} has no tokens. Pass some text.")
    _require_rows("the prompt", ids, tokenizer, vocab_size)
    return ids


def _require_rows(what: str, ids: Sequence[int], tokenizer: Any, vocab_size: int) -> None:
    """Raise BatchError for a token that the tokenizer has and the model lacks, such as a token for images beside a
    model of texts."""
    if (token := next((token for token in ids if token >= vocab_size), None)) is not None:
        raise BatchError(
            f"{what} has the token {tokenizer.convert_ids_to_tokens(token)!r:.80}, id {token}, and the model has rows "
            f"for the ids 0 to {vocab_size - 1} only. Leave the token out."
        )


def _encode_chat(tokenizer: Any, vocab_size: int, conversation: Sequence[Message]) -> list[int]:
    ids = encode_chat(tokenizer, conversation)
    _require_rows("the conversation, formatted by the model's chat template,", ids, tokenizer, vocab_size)
    return ids
