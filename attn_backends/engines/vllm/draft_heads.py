"""Subclasses of vLLM's greedy drafts whose next tokens come from the head and its arg max in one pass, opt-in by
ATTN_BACKENDS_DRAFT_HEAD.

vLLM calls `get_top_tokens` in its captured loop if use_local_argmax_reduction is set. The target verifies every token,
so its text does not depend on how the draft reads the head: in 16 bits, from a copy in 8, or only for some tokens.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch

from attn_backends.engines.vllm import compat
from attn_backends.engines.vllm.compat import (
    LM_HEAD_METHODS,
    ModelRegistry,
    OnlineLinearBase,
    current_platform,
    init_logger,
    quantized_lm_head_copy,
    replace_parameter,
    set_current_vllm_config,
    tensor_model_parallel_all_gather,
)
from attn_backends.engines.vllm.head_choice import HeadChoice
from attn_backends.engines.vllm.names import DRAFT_HEAD
from attn_backends.engines.vllm.reasons import not_started
from attn_backends.kernels.linear.fp8_weight import READING, Fp8Weight
from attn_backends.kernels.linear.top_tokens import TopTokens, top_tokens
from attn_backends.kernels.linear.warm_up import warm_up
from builders.devices import FP8_CAPABILITY

ARCHITECTURES = {
    "EagleLlamaForCausalLM": "EagleLlamaForCausalLM",
    **dict.fromkeys(("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"), "Eagle3LlamaForCausalLM"),
    "Eagle3Qwen3ForCausalLM": "Eagle3Qwen3ForCausalLM",
    "DFlashDraftModel": "DFlashQwen3ForCausalLM",
    "DeepSeekMTPModel": "DeepSeekMTP",
}
"""The class of vLLM's that each architecture of a draft's config.json names."""
NO_DRAFT = ("ngram", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")
"""vLLM's methods without a draft model."""
COPY = "attn_backends"
"""Our entry among vLLM's methods of quantising a copy of a head."""
_log = init_logger("vllm.attn_backends")


def register(value: str) -> None:
    """Let vLLM make our subclasses of its drafts. value: DRAFT_HEAD's. Raises ValueError as `HeadChoice.of` does."""
    TopTokensDraft.choice = choice = HeadChoice.of(value)
    LM_HEAD_METHODS[COPY] = partial(HeadCopy, choice)
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

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        require_served(vllm_config, self.choice)
        self._config = vllm_config
        self._readers: dict[Any, HeadReader] = {}

    def scored(self, hidden_states: torch.Tensor, step: int) -> tuple[Any, torch.Tensor]:
        """Return the head of a draft step and the states [M, K] that it multiplies."""
        return self.lm_head, hidden_states  # type: ignore[attr-defined]

    def get_top_tokens(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """Return the most likely token of each row, int64 [M], as target ids."""
        head, states = self.scored(hidden_states, spec_step_idx)
        if head not in self._readers:
            self._readers[head] = self._reader(head)
        top = self._readers[head].top_tokens(states)
        offsets = getattr(self, "draft_id_to_target_id", None)
        return top if offsets is None else top + offsets[top]

    def _reader(self, head: Any) -> HeadReader:
        """Return a reader of this head, or of its copy, which becomes a part of the draft: there, vLLM finds it when
        it reloads weights, and makes it anew in place."""
        require_readable(head)
        read = head
        if self.choice.copies:
            # A tensor that inference made could not be written outside of it.
            with torch.inference_mode(False), torch.no_grad(), set_current_vllm_config(self._config):
                read = quantized_lm_head_copy(head, COPY)
            self.add_module(f"head_copy_{len(self._readers)}", read)  # type: ignore[attr-defined]
        return HeadReader.of(read, head.weight.dtype, self.choice.ids)


class MtpTopTokensDraft(TopTokensDraft):
    """The same for DeepSeek's MTP, whose layers have a norm and a head each."""

    def scored(self, hidden_states: torch.Tensor, step: int) -> tuple[Any, torch.Tensor]:
        layers = list(self.model.layers.values())  # type: ignore[attr-defined]
        shared = layers[step % len(layers)].shared_head
        return shared.head, shared(hidden_states)


class HeadCopy(OnlineLinearBase):
    """How vLLM makes a copy of a head: `weight` [N, K] of the tokens to draft and, in 8 bits, `weight_scale` fp32
    [N]."""

    activation_quant_key = None

    def __init__(self, choice: HeadChoice) -> None:
        super().__init__()
        self.choice = choice

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.data
        if (tokens := kept(layer, self.choice.ids)) is not None:
            weight = weight[tokens - layer.shard_indices.org_vocab_start_index]
        if self.choice.rounds:
            rounded = Fp8Weight.of(weight)
            weight = rounded.values
            replace_parameter(layer, "weight_scale", rounded.scale)
        replace_parameter(layer, "weight", weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Raise NotImplementedError: only a `HeadReader` reads a copy."""
        raise NotImplementedError


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
    def of(cls, head: Any, dtype: torch.dtype, ids: tuple[int, ...] | None) -> HeadReader:
        """Read a vLLM head or a `HeadCopy`. dtype: of the states; ids: the tokens that a copy has; None: all."""
        weight, scale = head.weight.data, getattr(head, "weight_scale", None)
        tokens = kept(head, ids)
        count = head.shard_indices.num_org_elements if tokens is None else len(tokens)
        _log.info_once("The draft reads its head in %s bits, for %d tokens.", "16" if scale is None else "8", count)
        warm_up(top_tokens, TopTokens(weight.new_empty(0, weight.shape[1], dtype=dtype), weight, scale, count))
        return cls(weight, scale, count, head.shard_indices.org_vocab_start_index, tokens, head.tp_size)

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


def kept(head: Any, ids: tuple[int, ...] | None) -> torch.Tensor | None:
    """Return which of these ids this rank's part of a head has, int64; None for all. Raises ValueError for none."""
    if ids is None:
        return None
    start, count = head.shard_indices.org_vocab_start_index, head.shard_indices.num_org_elements
    here = [token for token in ids if start <= token < start + count]
    if not here:
        raise ValueError(
            f"the file of {DRAFT_HEAD} has no token from {start} to {start + count - 1}, which one of the GPUs has. "
            "Add some, or use fewer GPUs."
        )
    return torch.tensor(here, device=head.weight.device)


def require_readable(head: Any) -> None:
    """Raise ValueError for a head without 16-bit weights or with a bias, and RuntimeError during a capture, whose graph
    would copy the head in every replay."""
    weight, bias = head.weight, getattr(head, "bias", None)
    if weight.dtype not in READING or not weight.is_contiguous() or bias is not None:
        raise ValueError(
            f"{DRAFT_HEAD}: the draft's head has weights in {weight.dtype}{'' if bias is None else ' and a bias'}; it "
            "needs 16-bit weights without a bias. Leave the head unquantised, or unset the variable."
        )
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{DRAFT_HEAD}: the first draft is being captured, but its head is not prepared yet.")


def require_served(config: Any, choice: HeadChoice) -> None:
    """Raise ValueError for a VllmConfig that rules the choice out; warn if it has no draft model."""
    draft = config.speculative_config
    if draft is None or draft.method in NO_DRAFT:
        _log.warning("%s has no effect: there is no draft model. Unset it, or choose a draft.", DRAFT_HEAD)
    elif reasons := option_reasons(config, choice):
        raise ValueError(not_started(f"{DRAFT_HEAD} does not serve this draft", reasons))


def option_reasons(config: Any, choice: HeadChoice) -> list[str]:
    """List what of a VllmConfig rules the choice out, and what to do. It has a draft model."""
    draft, model = config.speculative_config, config.model_config
    of, vocab = draft.draft_model_config, model.get_vocab_size()
    scale, own = (getattr(of.hf_config, name, None) for name in ("logit_scale", "draft_vocab_size"))
    largest = -1 if choice.ids is None else choice.ids[-1]
    unset, capability = f"Unset {DRAFT_HEAD}.", FP8_CAPABILITY if choice.rounds else (8, 0)
    lower = f"{'.'.join(map(str, capability))}, which {8 if choice.rounds else 16}-bit weights need"
    instead = f"Set {DRAFT_HEAD} to 16." if choice.rounds else unset
    if "DFlash2" in of.architecture:
        return [f"DFlash2 chooses among several tokens of each place, and this finds only the most likely. {unset}"]
    if of.architecture not in ARCHITECTURES:
        return [f"its architecture is {of.architecture}, and only {', '.join(ARCHITECTURES)} are served. {unset}"]
    reasons = {
        f"the device is no CUDA GPU, and the kernel runs on nothing else. {unset}": not current_platform.is_cuda(),
        f"the GPU's compute capability is below {lower}. {instead}": (
            not current_platform.has_device_capability(capability)
        ),
        f"the model has {model.dtype}, and the kernel reads 16 bits. Use --dtype bfloat16.": model.dtype not in READING,
        "use_local_argmax_reduction is false, so vLLM asks for logits instead of tokens. Set it to true in "
        "--speculative-config.": not draft.use_local_argmax_reduction,
        f"draft_sample_method is {draft.draft_sample_method}, and it drafts greedily. Leave it out.": (
            draft.draft_sample_method != "greedy"
        ),
        f"draft_lm_head_quantization is {draft.draft_lm_head_quantization}, and only one of both can read the head. "
        "Leave it out.": draft.draft_lm_head_quantization is not None,
        "LoRA is on, and it adds no adapters. Start without --enable-lora.": config.lora_config is not None,
        f"logits are {model.head_dtype}, and it multiplies in {model.dtype}. Leave head_dtype out of "
        "--hf-overrides.": model.head_dtype != model.dtype,
        f"logit_scale is {scale}, which reverses the order of logits. {unset}": scale is not None and scale <= 0,
    }
    if choice.copies:
        reasons |= {
            "sleep mode is on, and may discard the copy of the head. Start without --enable-sleep-mode.": (
                model.enable_sleep_mode
            ),
            "Model Runner V2 is off, and no other renews the copy of the head when weights are reloaded. Set "
            f"{DRAFT_HEAD} to 16.": not config.use_v2_model_runner,
            f"{choice.path} has token {largest}, and the target has {vocab} tokens. Use ids of its tokenizer.": (
                largest >= vocab
            ),
            f"the draft has a vocabulary of its own, of {own} tokens, which {choice.path} does not fit. Leave the file "
            "out.": choice.ids is not None and own not in (None, vocab),
        }
    return [reason for reason, applies in reasons.items() if applies]
