"""DeepSeek-style mixture of experts, and loading it under a model family's tensor names.

Legend: T tokens, H hidden size, I intermediate size, E experts, k experts of a token. Floats are in the experts' dtype
unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from attn_backends.kernels.linear.fp8_weight import Weight, empty_stack, fill, operands
from attn_backends.kernels.linear.skinny_linear import wide_linear
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, frozen, held
from spec_decode.models.kernels.combine_experts import combine_experts
from spec_decode.models.kernels.order_by_expert import order_by_expert
from spec_decode.models.kernels.route_tokens import Routing, route_tokens
from spec_decode.models.layers.feed_forward import (
    LLAMA_NAMES,
    FeedForward,
    GatedFeedForward,
    Names,
    read_dense,
    read_gate_up_down,
)
from spec_decode.models.layers.linear import grouped_gated_linear, grouped_linear


class Experts(nn.Module):
    """E feed-forwards, k of them for each token: gate_up [E, 2 I, H] and down [E, H, I].

    limit, alpha: of the activation, as in `swiglu`. gate_up_bias [E, 2 I] and down_bias [E, H]: None without biases.
    """

    gate_up: Weight
    down: Weight

    def __init__(
        self,
        gate_up: Weight,
        down: Weight,
        limit: float | None = None,
        *,
        alpha: float | None = None,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.gate_up, self.down = held(gate_up), held(down)
        self.limit, self.alpha = limit, alpha
        self.gate_up_bias = None if gate_up_bias is None else frozen(gate_up_bias)
        self.down_bias = None if down_bias is None else frozen(down_bias)

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, shared: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of k feed-forwards, plus `shared` [T, H] if given, in fp32 and rounded once; [T, H].

        x: [T, H]; weights: fp32 [T, k]; experts: int64 [T, k]. A decode of T tokens reads the weights of at most min(E,
        k T) experts: memory traffic grows with T until every expert has a row.
        """
        tokens, places, ends = order_by_expert(experts, self.gate_up.shape[0])
        bias, alpha = self.gate_up_bias, self.alpha
        inner = grouped_gated_linear(x, tokens, self.gate_up, ends, self.limit, bias=bias, alpha=alpha)
        rows = grouped_linear(inner, self.down, ends, self.down_bias)
        return combine_experts(rows, weights, places, shared)


class MixtureOfExperts(nn.Module):
    """Routed experts plus an optional shared expert: router fp32 [E, H], with fp32 [E] the bias of the choice and
    optionally logit_bias of the logits."""

    def __init__(
        self,
        routing: Routing,
        router: torch.Tensor,
        bias: torch.Tensor,
        experts: Experts,
        shared: FeedForward | None = None,
        *,
        logit_bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.routing = routing
        self.router, self.bias = frozen(router), frozen(bias)
        self.experts, self.shared = experts, shared
        self.logit_bias = None if logit_bias is None else frozen(logit_bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return [T, H] for x [T, H], plus the residual [T, H] if given."""
        weights, experts = route_tokens(wide_linear(x, self.router), self.bias, self.routing, self.logit_bias)
        shared = residual if self.shared is None else self.shared(x, residual)
        out: torch.Tensor = self.experts(x, weights, experts, shared)
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureShape:
    """Sizes of a mixture of experts. shared: intermediate size of the shared expert, 0 for none."""

    hidden: int
    intermediate: int
    shared: int
    routing: Routing
    limit: float | None = None
    """Limit of the gate and up activations; None for none."""


def read_mixture_shape(config: ConfigReader, hidden: int, *, scoring: str) -> MixtureShape:
    """Read the mixture from config.json. scoring: the family's scoring function, if the file does not say.

    Raises CheckpointError for an impossible routing.
    """
    intermediate = config.get("moe_intermediate_size", int)
    limit = config.get("swiglu_limit", float, 0.0)
    # null means one group.
    groups, top_groups = config.get("n_group", int, 1), config.get("topk_group", int, 1)
    try:
        routing = Routing(
            num_experts=config.get("n_routed_experts", int),
            top_k=config.get("num_experts_per_tok", int),
            scoring=config.get("scoring_func", str, scoring),  # type: ignore[arg-type]  # Routing validates it
            groups=groups,
            top_groups=top_groups,
            normalised=config.get("norm_topk_prob", bool, True),
            scale=config.get("routed_scaling_factor", float, 1.0),
        )
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"invalid mixture of experts in {config.place}: {error}. Restore the file.") from error
    return MixtureShape(
        hidden=hidden,
        intermediate=intermediate,
        shared=intermediate * config.get("n_shared_experts", int, 0),
        routing=routing,
        limit=limit if limit > 0 else None,
    )


def read_mixture(shape: MixtureShape, weights: ScopedWeights, names: Names) -> MixtureOfExperts:
    """Read the router, the experts and the shared expert under the weights' prefix."""
    count = shape.routing.num_experts
    router = weights.take("gate.weight", count, shape.hidden, dtype=torch.float32)
    bias = torch.zeros(count, dtype=torch.float32, device=weights.device)
    if names.router_bias:
        bias = weights.take(names.router_bias, count, dtype=torch.float32)
    shared = None
    if shape.shared:
        shared = read_dense(weights.under("shared_experts."), names, shape.hidden, shape.shared, shape.limit)
    return MixtureOfExperts(shape.routing, router, bias, _read_experts(shape, weights, names), shared)


def read_deepseek_feed_forward(
    config: ConfigReader, weights: ScopedWeights, layer: int
) -> FeedForward | MixtureOfExperts:
    """Read the feed-forward of a layer in the layout of DeepSeek-V3 and GLM-4.5, whose config says by the layer's index
    whether it is dense or a mixture with sigmoid routing, a bias of the choice and a shared expert. Raises
    CheckpointError."""
    hidden = config.get("hidden_size", int)
    first, every = config.get("first_k_dense_replace", int, 0), config.get("moe_layer_freq", int, 1)
    routed = config.optional("n_routed_experts", int) is not None
    if routed and layer >= first and layer % max(every, 1) == 0:
        mixture = read_mixture_shape(config, hidden, scoring="sigmoid")
        return read_mixture(mixture, weights, replace(LLAMA_NAMES, router_bias="gate.e_score_correction_bias"))
    return read_dense(weights, LLAMA_NAMES, hidden, config.get("intermediate_size", int), None)


def read_qwen_mixture(config: ConfigReader, weights: ScopedWeights) -> MixtureOfExperts:
    """Read a Qwen mixture: softmax routing, without a shared expert.

    Raises CheckpointError for an impossible routing.
    """
    # transformers renamed the field in its version 5.
    count = config.optional("num_local_experts", int)
    fields = {
        "n_routed_experts": config.get("num_experts", int) if count is None else count,
        "num_experts_per_tok": config.get("num_experts_per_tok", int),
        "moe_intermediate_size": config.get("moe_intermediate_size", int),
        "norm_topk_prob": config.get("norm_topk_prob", bool, True),
    }
    hidden = config.get("hidden_size", int)
    shape = read_mixture_shape(ConfigReader(fields, config.place), hidden, scoring="softmax")
    return read_mixture(shape, weights, LLAMA_NAMES)


def read_shared_qwen_mixture(config: ConfigReader, weights: ScopedWeights) -> MixtureOfExperts:
    """As `read_qwen_mixture`, with a gated shared expert."""
    hidden, shared = config.get("hidden_size", int), config.get("shared_expert_intermediate_size", int)
    mixture = read_qwen_mixture(config, weights)
    gate_up, down = read_gate_up_down(weights.under("shared_expert."), LLAMA_NAMES, hidden, shared)
    mixture.shared = GatedFeedForward(weights.take("shared_expert_gate.weight", 1, hidden), gate_up, down)
    return mixture


def _read_experts(shape: MixtureShape, weights: ScopedWeights, names: Names) -> Experts:
    """Read the stacked experts, or copy separate ones into a stack one by one: experts are most of a draft's memory and
    must not exist twice."""
    count, hidden, intermediate = shape.routing.num_experts, shape.hidden, shape.intermediate
    if weights.has("experts.gate_up_proj"):
        stacked = weights.product(["experts.gate_up_proj"], [count], 2 * intermediate, hidden)
        return Experts(stacked, weights.product(["experts.down_proj"], [count], hidden, intermediate), shape.limit)
    stacks: list[Weight] = []
    for index in range(count):
        expert = read_gate_up_down(weights.under(f"experts.{index}."), names, hidden, intermediate)
        # The first expert validates the sizes before memory for all is allocated.
        stacks = stacks or [empty_stack(part, count) for part in expert]
        for stack, part in zip(stacks, expert, strict=True):
            if type(operands(stack)[1]) is not type(operands(part)[1]):
                raise CheckpointError(
                    f"some of {weights.prefix}experts in {weights.store.folder} are stored in 8 bits and others are "
                    f"not, {index} first. Pass weights='fp8', or use a bf16 copy."
                )
            fill(stack, index, part)
    gate_up, down = stacks
    return Experts(gate_up, down, shape.limit)
