"""A target that runs any causal language model of the library `transformers` over this library's paged attention.

Legend: T flat tokens, H hidden size, V vocabulary. The library sees one row of T tokens with explicit positions,
without its cache and its masks: only the attention decides which tokens are visible.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from attn_backends import StateInputs
from builders import AttentionSpec, StateSpec
from spec_decode.model_api import (
    Attention,
    AttentionInputs,
    LayerGroup,
    RecurrentAttention,
    TargetModel,
    TargetStates,
)
from spec_decode.models.checkpoints.files import CheckpointError, is_finite
from spec_decode.models.decoder import check_aux_layers
from spec_decode.models.hf.attention import ATTENTION_NAME, serving, unserved
from spec_decode.models.hf.experts import serve_experts
from spec_decode.models.hf.hidden_states import capturing, set_hooks
from spec_decode.models.hf.state_kinds import STATE_KINDS
from spec_decode.models.hf.state_layers import STATE_LAYER_TYPES, state_layers, wrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 2
S = TypeVar("S", AttentionSpec, StateSpec)
_ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention")
_TOKENWISE_LAYER_TYPES = ("mlp", "moe")
"""Layers of a feed-forward alone."""
_LOGIT_FIELDS = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""Config fields that change logits: Cohere multiplies, Granite divides, Gemma caps."""
_LARGER = {torch.float16: "Load it in bfloat16 or float32", torch.bfloat16: "Load it in float32"}
"""What to do if a dtype overflows."""


class TransformersTarget(TargetModel):
    """A causal language model of `transformers`, in eval mode on one device.

    The target takes over the model: it replaces the model's attention and recurrences, and a direct call of the model
    raises UnservedModel; on a GPU also its experts, see `serve_experts`. At construction, each layer whose recurrence
    or experts are replaced is compared with its own forward, and a forward over two tokens records the attention or
    recurrence that each layer requests. A forward runs on the device only, so a graph can hold it, unless the library
    computes the experts and reads the host to do so.
    """

    def __init__(self, model: PreTrainedModel, *, aux_hidden_state_layers: Sequence[int] | None = None) -> None:
        """aux_hidden_state_layers: the layers whose input residual states, concatenated in this order, are the
        target_hidden_states (EAGLE-3 reads 2, n // 2 and n - 3 of n layers; n is the last layer's output, before the
        final norm). None: the hidden states after the final norm.

        Raises UnservedModel if the model does anything that `transformers`' attention interface does not expose, and
        CheckpointError for weights or logits that are NaN or infinite.
        """
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.config: Any = model.config.get_text_config()
        _refuse_unsupported_architectures(model, self.config)
        _refuse_non_finite(model)
        self._accepts = inspect.signature(type(self._decoder).forward).parameters.keys()
        self.vocab_size = self.lm_head.out_features
        self.hidden_size = self.config.hidden_size
        self.max_positions = self.config.max_position_embeddings
        self.num_layers: int = self.config.num_hidden_layers
        self.aux_hidden_state_layers = None if aux_hidden_state_layers is None else tuple(aux_hidden_state_layers)
        check_aux_layers(self.aux_hidden_state_layers, self.num_layers)
        num_states = 1 if aux_hidden_state_layers is None else len(aux_hidden_state_layers)
        self.target_states_size = num_states * self.hidden_size
        self._specs: dict[int, AttentionSpec | StateSpec] = {}
        _silence_padding_warning(model)
        model.set_attn_implementation(ATTENTION_NAME)
        if self.config._attn_implementation != ATTENTION_NAME:
            raise unserved(f"{type(model).__name__} does not use the library's attention interface")
        wrap(state_layers(model), self.hidden_size)
        self.serves_experts = serve_experts(model, self.embed.weight.device)
        """Whether this library's kernels compute the experts."""
        self._probe()
        if self.aux_hidden_state_layers is not None:
            set_hooks(self._decoder, self.num_layers, self.aux_hidden_state_layers)

    @property
    def embed(self) -> nn.Embedding:
        """The token embedding; weight [V, H]."""
        embed: nn.Embedding = self.model.get_input_embeddings()
        return embed

    @property
    def lm_head(self) -> nn.Linear:
        """The output projection; weight [V, H]."""
        lm_head: nn.Linear = self.model.get_output_embeddings()
        return lm_head

    @property
    def output_projection(self) -> torch.Tensor | None:
        """[V, H]; None if the logits have a bias, or the model's config scales or caps them."""
        plain = self.lm_head.bias is None and not any(getattr(self.config, name, None) for name in _LOGIT_FIELDS)
        return self.lm_head.weight if plain else None

    @property
    def _decoder(self) -> nn.Module:
        return _decoder_of(self.model)

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """Return one group for each distinct spec, named `full` or `sliding`; a number distinguishes groups that share
        a name."""
        groups: list[LayerGroup] = []
        for spec, layers in self._layers_by_spec(AttentionSpec).items():
            name = "full" if spec.sliding_window is None else "sliding"
            same = sum(group.name.split("_")[0] == name for group in groups)
            name = f"{name}_{same + 1}" if same else name
            groups.append(LayerGroup(name=name, spec=replace(spec, page_size=page_size), layers=layers))
        return groups

    def state_groups(self, journal: int) -> list[LayerGroup[StateSpec]]:
        """Return one group for each distinct spec: `state`, `state_2` and so on."""
        return [
            LayerGroup(name=f"state_{i}" if i > 1 else "state", spec=replace(spec, journal=journal), layers=layers)
            for i, (spec, layers) in enumerate(self._layers_by_spec(StateSpec).items(), 1)
        ]

    def _layers_by_spec(self, kind: type[S]) -> dict[S, tuple[int, ...]]:
        specs = {layer: spec for layer, spec in sorted(self._specs.items()) if isinstance(spec, kind)}
        return {spec: tuple(each for each in specs if specs[each] == spec) for spec in specs.values()}

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> TargetStates:
        """Compute the states for token_ids and positions, int64 [T]; hidden holds those after the final norm.

        Raises UnservedModel if a layer requests other attention than at construction.
        """
        with serving(_Serving(self._specs, attention)), capturing() as states:
            out = self._decoder(**self._inputs(token_ids, positions))
        hidden: torch.Tensor = out.last_hidden_state[0]
        if self.aux_hidden_state_layers is None:
            return TargetStates(hidden, hidden)
        return TargetStates(hidden, torch.cat([states[layer][0] for layer in self.aux_hidden_state_layers], -1))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, V] for hidden [T, H], scaled and capped as the model's config says."""
        logits: torch.Tensor = self.lm_head(hidden)
        scale, divisor, cap = (getattr(self.config, name, None) for name in _LOGIT_FIELDS)
        if scale:
            logits = logits * scale
        if divisor:
            logits = logits / divisor
        if cap:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def _inputs(self, token_ids: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        inputs = {
            "input_ids": token_ids[None],
            "position_ids": positions[None],
            "use_cache": False,
            "return_dict": True,
        }
        # Without it, a model that uses cache_position would count from 0.
        return inputs | ({"cache_position": positions} if "cache_position" in self._accepts else {})

    @torch.no_grad()
    def _probe(self) -> None:
        """Run two tokens, record what each layer requests, and compare this target's logits with the model's own."""
        states: list[torch.Tensor] = []
        recording = _Recording()
        tokens = torch.arange(_PROBE_TOKENS, device=self.embed.weight.device)
        handle = self._decoder.register_forward_hook(lambda _, __, out: states.append(out.last_hidden_state[0]))
        try:
            with serving(recording):
                logits = self.model(**self._inputs(tokens, tokens)).logits[0]
        finally:
            handle.remove()
        if not states:
            raise unserved(f"{type(self.model).__name__} bypasses its decoder, {type(self._decoder).__name__}")
        self._check_layers(recording.requested)
        self._specs = {layer: spec for layer, (spec,) in recording.requested.items()}
        self._check_logits(states[0], logits)

    def _check_layers(self, requested: dict[int, list[AttentionSpec | StateSpec]]) -> None:
        types = dict(enumerate(getattr(self.config, "layer_types", None) or ()))
        mask_window = self._mask_window() if not types else None
        for layer in sorted(requested.keys() | set(range(self.num_layers))):
            specs = requested.get(layer, [])
            kind = types.get(layer)
            if len(specs) != (kind not in _TOKENWISE_LAYER_TYPES):
                expected = "at all" if specs and kind in _TOKENWISE_LAYER_TYPES else "once"
                raise unserved(f"layer {layer} called attention {len(specs)} times in a forward, not {expected}")
            if not specs:
                continue
            recurs = isinstance(specs[0], StateSpec)
            if kind and (kind in STATE_LAYER_TYPES) != recurs:
                called = "a recurrence" if recurs else "attention"
                raise unserved(f"layer {layer} is of type {kind}, but calls {called}")
            window = getattr(specs[0], "sliding_window", None)
            if kind and (kind == "sliding_attention") != (window is not None):
                raise unserved(f"layer {layer} is of type {kind}, but requests a window of {window} tokens")
            if mask_window is not None and window is None:
                raise unserved(f"layer {layer} requests no window, but the config has one of {mask_window} tokens")
        if not any(isinstance(spec, AttentionSpec) for specs in requested.values() for spec in specs):
            raise unserved("none of its layers has attention, and a text's length is counted in its pages")

    def _mask_window(self) -> int | None:
        """Return the window in a config class that has the field, if texts can be longer. Some models implement the
        window only in the library's masks, which are not created here."""
        fields = inspect.signature(type(self.config)).parameters
        window = self.config.sliding_window if "sliding_window" in fields else None
        return window if isinstance(window, int) and window < self.max_positions else None

    def _check_logits(self, hidden: torch.Tensor, expected: torch.Tensor) -> None:
        logits, expected = self.logits(hidden).float(), expected.float()
        if not bool(expected.isfinite().all()):
            dtype = str(hidden.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"the logits of {type(self.model).__name__} are NaN or infinite, although its weights are finite: its "
                f"activations exceed what {dtype} holds, {torch.finfo(hidden.dtype).max:.4g}. "
                f"{_LARGER.get(hidden.dtype, 'Restore the weights')}."
            )
        # Wide enough for bf16 rounding in another matrix shape, narrow enough to detect a missing factor or cap.
        same_shape = logits.shape == expected.shape
        close = same_shape and bool((logits - expected).abs().max() <= 0.03 * expected.abs().max())
        if not close:
            raise unserved(
                f"{type(self.model).__name__} does not compute its logits from the last states by an output projection "
                f"with logit_scale, logits_scaling or final_logit_softcapping: {list(expected.shape)} up to "
                f"{expected.abs().max():.4g}, where those give {list(logits.shape)} up to {logits.abs().max():.4g}"
            )


@dataclass(frozen=True, slots=True)
class _Serving:
    """A `Serve` of layers that must request what they requested at construction."""

    specs: dict[int, AttentionSpec | StateSpec]
    attention: Attention

    def attend(self, inputs: AttentionInputs, spec: AttentionSpec) -> torch.Tensor:
        self._check(inputs.layer, spec)
        return self.attention(inputs)

    def recur(self, layer: int, inputs: StateInputs, spec: StateSpec) -> torch.Tensor:
        self._check(layer, spec)
        return cast(RecurrentAttention, self.attention).recur(layer, inputs)

    def _check(self, layer: int, spec: AttentionSpec | StateSpec) -> None:
        if spec != (expected := self.specs.get(layer)):
            raise unserved(f"layer {layer} requests {spec}, and requested {expected} at construction")


@dataclass(frozen=True, slots=True)
class _Recording:
    """A `Serve` that records what each layer requests, and returns its values."""

    requested: dict[int, list[AttentionSpec | StateSpec]] = field(default_factory=dict)

    def attend(self, inputs: AttentionInputs, spec: AttentionSpec) -> torch.Tensor:
        self.requested.setdefault(inputs.layer, []).append(spec)
        return inputs.value.repeat_interleave(spec.group_size, 1)

    def recur(self, layer: int, inputs: StateInputs, spec: StateSpec) -> torch.Tensor:
        self.requested.setdefault(layer, []).append(spec)
        heads, dim = spec.num_value_heads, spec.value_dim
        return inputs.x[:, -heads * dim :].reshape(-1, heads, dim)


def _decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the layers with embedding and final norm, or the model itself if it has no separate decoder."""
    # In older versions of the library, some models return themselves; use their base then.
    decoder: nn.Module = model.base_model if model.get_decoder() is model else model.get_decoder()
    return decoder


def _silence_padding_warning(model: PreTrainedModel) -> None:
    """Remove a warning that reads ids on the host to find pad tokens, which graph capture forbids; nothing is
    padded."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None


def _refuse_non_finite(model: PreTrainedModel) -> None:
    if wrong := [name for name, weight in model.state_dict().items() if not is_finite(weight)]:
        raise CheckpointError(
            f"the weights of {type(model).__name__} must be finite numbers, got NaN or infinity in {len(wrong)} of "
            f"them, {wrong[0]} first. Restore them."
        )


def _refuse_unsupported_architectures(model: PreTrainedModel, config: Any) -> None:
    """Raise UnservedModel for properties that no layer's attention call would reveal."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise unserved(f"{name} is an encoder-decoder")
    wrapped = state_layers(model)
    if getattr(model, "_is_stateful", False) and not wrapped:
        children = [(type(module).__name__, child) for module in model.modules() for child in module.children()]
        convolved = {owner for owner, child in children if isinstance(child, nn.Conv1d)}
        raise unserved(
            f"{name} keeps state other than keys and values (recurrent, convolutional or compressed) in its layers "
            f"({', '.join(sorted(convolved)) or 'without convolutions'}); those served are {', '.join(STATE_KINDS)}"
        )
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        types = (*_ATTENTION_LAYER_TYPES, *_TOKENWISE_LAYER_TYPES, *STATE_LAYER_TYPES * (layer in wrapped))
        if kind not in types:
            owners = [type(each).__name__ for each in model.modules() if getattr(each, "layer_idx", None) == layer]
            if kind in STATE_LAYER_TYPES and owners:
                served = ", ".join(STATE_KINDS)
                raise unserved(
                    f"layer {layer} of {name} computes its {kind} in {owners[-1]}; those served are {served}"
                )
            raise unserved(f"layer {layer} of {name} is of type {kind}, not {' or '.join(types)}")
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise unserved(f"{name} has no output projection to a vocabulary")
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise unserved(f"the config of {name} has no max_position_embeddings")
    if (decoder := _decoder_of(model)) is model:
        raise unserved(f"{name} has no decoder separate from its output projection")
    if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
        raise unserved(f"{name} takes no position_ids: it computes positions itself")
    if len(devices := {parameter.device for parameter in model.parameters()}) != 1 or "meta" in str(devices):
        raise unserved(f"the parameters of {name} are on {', '.join(sorted(map(str, devices)))}, not on one device")
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind == "longrope" or "dynamic" in (kind or ""):
                raise unserved(
                    f"{path} rotates keys by angles that depend on the longest text of the batch (rope type {kind}), "
                    "so cached keys would become wrong"
                )
