"""Subclasses of vLLM's greedy drafts whose next tokens come from the head and its arg max in one pass, opt-in by
ATTN_BACKENDS_DRAFT_HEAD.

vLLM calls `get_top_tokens` in its captured loop if use_local_argmax_reduction is set. The target verifies every token,
so its text does not depend on how the draft reads the head: in 16 bits, from a copy in 8, or only for some tokens.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from attn_backends.engines.vllm import compat
from attn_backends.engines.vllm.compat import (
    ModelRegistry,
    current_platform,
    init_logger,
    tensor_model_parallel_all_gather,
)
from attn_backends.engines.vllm.names import DRAFT_HEAD
from attn_backends.kernels.linear.fp8_weight import READING, Fp8Weight
from attn_backends.kernels.linear.top_tokens import TopTokens, top_tokens
from attn_backends.kernels.linear.warm_up import warm_up
from builders.devices import FP8_CAPABILITY

ARCHITECTURES = {
    "EagleLlamaForCausalLM": "EagleLlamaForCausalLM",
    **dict.fromkeys(("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"), "Eagle3LlamaForCausalLM"),
    "Eagle3Qwen3ForCausalLM": "Eagle3Qwen3ForCausalLM",
    "DFlashDraftModel": "DFlashQwen3ForCausalLM",
    "DFlash2DraftModel": "DFlash2Qwen3ForCausalLM",
    "DeepSeekMTPModel": "DeepSeekMTP",
}
"""The class of vLLM's that each architecture of a draft's config.json names."""
_log = init_logger("vllm.attn_backends")


class HeadChoice(NamedTuple):
    """How a draft reads its head.

    rounds  from a copy in 8 bits
    tokens  file of the token ids that it may draft; None: all
    """

    rounds: bool
    tokens: Path | None

    @classmethod
    def of(cls, value: str) -> HeadChoice:
        """Read the variable's value. Raises ValueError for one that means nothing."""
        bits, colon, path = value.partition(":")
        if bits not in ("16", "fp8") or bool(colon) is not bool(path):
            raise ValueError(
                f"{DRAFT_HEAD} must be 16 or fp8, or one of them with a file of token ids, such as fp8:ids.json, got "
                f"{value!r}."
            )
        return cls(bits == "fp8", Path(path) if path else None)


def register(value: str) -> None:
    """Let vLLM make our subclasses of its drafts. value: DRAFT_HEAD's. Raises ValueError for a wrong one."""
    TopTokensDraft.choice = HeadChoice.of(value)
    for architecture, title in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, f"{__name__}:{title}")


@cache
def __getattr__(title: str) -> type[Any]:
    """Return our subclass of this class of vLLM's, which vLLM asks for by name."""
    if title not in ARCHITECTURES.values():
        raise AttributeError(f"module {__name__!r} has no attribute {title!r}")
    base = getattr(compat, title)
    return type(
        title, (MtpTopTokensDraft if title == "DeepSeekMTP" else TopTokensDraft, base), {"__module__": __name__}
    )


class TopTokensDraft:
    """Mixin for a draft with an `lm_head`: `get_top_tokens` over our kernel.

    Raises ValueError when the model is made, or when it first drafts, for what it does not serve.
    """

    choice: ClassVar[HeadChoice]
    ids: tuple[int, ...] | None = None
    """Of the tokens it may draft."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        reasons = option_reasons(vllm_config, self.choice)
        if hasattr(self, "compute_candidates"):
            reasons.append("a DFlash2 draft selects among several tokens of each place")
        if self.choice.tokens is not None:
            if getattr(self, "draft_id_to_target_id", None) is not None:
                reasons.append(f"the draft has a vocabulary of its own; leave out {self.choice.tokens}")
            self.ids = read_token_ids(self.choice.tokens, vllm_config.model_config.get_vocab_size())
        if reasons:
            raise ValueError(f"{DRAFT_HEAD} does not serve this draft, so vLLM was not started: {'; '.join(reasons)}.")
        self._readers: dict[Any, HeadReader] = {}

    def scored(self, hidden_states: torch.Tensor, step: int) -> tuple[Any, torch.Tensor]:
        """Return the head of a draft step and the states [M, K] that it multiplies."""
        return self.lm_head, hidden_states  # type: ignore[attr-defined]

    def get_top_tokens(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """Return the most likely token of each row, int64 [M], as target ids."""
        head, states = self.scored(hidden_states, spec_step_idx)
        if head not in self._readers:
            self._readers[head] = HeadReader.of(head, self.choice.rounds, self.ids)
        top = self._readers[head].top_tokens(states)
        offsets = getattr(self, "draft_id_to_target_id", None)
        return top if offsets is None else top + offsets[top]


class MtpTopTokensDraft(TopTokensDraft):
    """The same for DeepSeek's MTP, whose layers have a norm and a head each."""

    def scored(self, hidden_states: torch.Tensor, step: int) -> tuple[Any, torch.Tensor]:
        layers = list(self.model.layers.values())  # type: ignore[attr-defined]
        shared = layers[step % len(layers)].shared_head
        return shared.head, shared(hidden_states)


class HeadReader(NamedTuple):
    """One rank's part of a head, as the kernel reads it.

    weight      [N, K], in 16 bits or in 8
    scale       fp32 [N] of 8 bits, or None
    num_tokens  rows of the weight that are tokens
    start       id of the first
    ids         int64 [num_tokens]: their ids, if they do not follow one another
    num_ranks   that have a part of the head
    """

    weight: torch.Tensor
    scale: torch.Tensor | None
    num_tokens: int
    start: int
    ids: torch.Tensor | None
    num_ranks: int

    @classmethod
    def of(cls, head: Any, rounds: bool, ids: tuple[int, ...] | None) -> HeadReader:
        """Read a vLLM head, with a copy if it is rounded or pruned. ids: the tokens to keep; None: all. Raises
        ValueError for a head without 16-bit weights, and for ids of which this rank has none; RuntimeError during a
        capture, whose graph would copy it in every replay."""
        weight, indices = head.weight, head.shard_indices
        if weight.dtype not in READING or not weight.is_contiguous():
            raise ValueError(
                f"{DRAFT_HEAD} needs a head with 16-bit weights, this one has {weight.dtype}. Leave the head "
                "unquantised, or unset the variable."
            )
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{DRAFT_HEAD}: the first draft is being captured, but its head is not prepared yet.")
        start, count = indices.org_vocab_start_index, indices.num_org_elements
        kept = None
        if ids is not None:
            here = [token for token in ids if start <= token < start + count]
            if not here:
                raise ValueError(
                    f"the file of {DRAFT_HEAD} has no token from {start} to {start + count - 1}, which one of the "
                    "GPUs has. Add some, or use fewer GPUs."
                )
            kept = torch.tensor(here, device=weight.device)
            weight, count = weight.data[kept - start], len(here)
        rounded = Fp8Weight.of(weight) if rounds else None
        _log.info_once("The draft reads its head in %s bits, for %d tokens.", "8" if rounds else "16", count)
        values, scale = (weight.data, None) if rounded is None else (rounded.values, rounded.scale)
        warm_up(top_tokens, TopTokens(values.new_empty(0, values.shape[1], dtype=weight.dtype), values, scale, count))
        return cls(values, scale, count, start, kept, head.tp_size)

    def top_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Return the most likely token of each row of states [M, K], int64 [M]; the lowest rank's among equal ones."""
        value, index = top_tokens(states, self.weight, self.scale, self.num_tokens)
        top: torch.Tensor = index + self.start if self.ids is None else self.ids[index]
        if self.num_ranks == 1:
            return top
        pairs = tensor_model_parallel_all_gather(torch.stack([value, top.float()], -1), dim=-1)
        pairs = pairs.view(len(states), self.num_ranks, 2)
        best = pairs[:, :, 0].argmax(1, keepdim=True)
        top = pairs[:, :, 1].gather(1, best)[:, 0].long()
        return top


def option_reasons(config: Any, choice: HeadChoice) -> list[str]:
    """List the options of a VllmConfig, and what to do, that rule the choice out."""
    draft, model = config.speculative_config, config.model_config
    copies = choice.rounds or choice.tokens is not None
    draft_config = draft.draft_model_config.hf_config
    capability = FP8_CAPABILITY if choice.rounds else (8, 0)
    reasons = {
        "it runs on CUDA only": not current_platform.is_cuda(),
        f"its kernel reads no {model.dtype}; use --dtype bfloat16": model.dtype not in READING,
        "its kernel needs compute capability {}.{}": not current_platform.has_device_capability(capability),
        "set use_local_argmax_reduction to true in --speculative-config": not draft.use_local_argmax_reduction,
        "it drafts greedily; leave out draft_sample_method": draft.draft_sample_method != "greedy",
        "it reads the head itself; leave out draft_lm_head_quantization": draft.draft_lm_head_quantization is not None,
        "it adds no LoRA adapters; start without --enable-lora": config.lora_config is not None,
        "its copy of the head is not reloaded; start without --enable-sleep-mode": copies and model.enable_sleep_mode,
        f"logits are {model.head_dtype}; leave head_dtype out of --hf-overrides": model.head_dtype != model.dtype,
        "a logit_scale of 0 or less reverses their order": getattr(draft_config, "logit_scale", 1.0) <= 0,
    }
    return [reason.format(*capability) for reason, applies in reasons.items() if applies]


def read_token_ids(path: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids in a file, ascending: a JSON list, or a list or tensor in torch's `.pt`. Raises ValueError
    for a file that cannot be read, is empty or holds anything but different ids from 0 to vocab_size - 1."""
    try:
        found = torch.load(path, weights_only=True) if path.suffix == ".pt" else json.loads(path.read_text())
    except Exception as error:
        raise ValueError(f"{DRAFT_HEAD}: {path} cannot be read as token ids: {error}") from error
    ids = found.tolist() if isinstance(found, torch.Tensor) else found
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{DRAFT_HEAD}: {path} must hold a list of token ids, got {type(found).__name__} {ids!r:.40}.")
    seen = set[int]()
    for at, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size or token in seen:
            raise ValueError(
                f"{DRAFT_HEAD}: entry {at} of {path} must be a token id from 0 to {vocab_size - 1} that is in the file "
                f"once, got {token!r}. Use ids of the target's tokenizer."
            )
        seen.add(token)
    return tuple(sorted(seen))
