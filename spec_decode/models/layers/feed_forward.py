"""Reading a feed-forward block, dense or a mixture of experts, under the names of a model family."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.errors import CheckpointError
from spec_decode.models.checkpoints.scoped_weights import ScopedWeights
from spec_decode.models.layers.moe import Experts, FeedForward, MixtureOfExperts, Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """What a family calls the parts of a feed-forward, and the bias of its router."""

    gate: str
    up: str
    down: str
    router_bias: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureShape:
    """Sizes of a mixture of experts. shared: intermediate size of the expert that every token takes, 0 for none."""

    hidden: int
    intermediate: int
    shared: int
    routing: Routing
    limit: float | None = None
    """Bound on what the gate and the up projection give; None for none."""


def read_mixture_shape(config: ConfigReader, hidden: int, *, scoring: str) -> MixtureShape:
    """The mixture that config.json describes; scoring: the family's, where the file does not say it.

    Raises CheckpointError for a routing that no mixture could have.
    """
    intermediate = config.get("moe_intermediate_size", int)
    limit = config.get("swiglu_limit", float, 0.0)
    # A config that says null means one group.
    groups, top_groups = config.get("n_group", int, 1), config.get("topk_group", int, 1)
    try:
        routing = Routing(
            num_experts=config.get("n_routed_experts", int),
            top_k=config.get("num_experts_per_tok", int),
            scoring=config.get("scoring_func", str, scoring),  # type: ignore[arg-type]  # the Routing judges it
            groups=groups,
            top_groups=top_groups,
            normalised=config.get("norm_topk_prob", bool, True),
            scale=config.get("routed_scaling_factor", float, 1.0),
        )
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{config.place} describes no mixture of experts: {error}; nothing was loaded. Restore the file."
        ) from error
    return MixtureShape(
        hidden=hidden,
        intermediate=intermediate,
        shared=intermediate * config.get("n_shared_experts", int, 0),
        routing=routing,
        limit=limit if limit > 0 else None,
    )


def read_mixture(shape: MixtureShape, weights: ScopedWeights, names: Names) -> MixtureOfExperts:
    """The router, the experts and the shared expert under the weights' prefix."""
    count = shape.routing.num_experts
    bias = torch.zeros(count, dtype=torch.float32, device=weights.device)
    if weights.has(names.router_bias):
        bias = weights.take(names.router_bias, count, dtype=torch.float32)
    router = weights.take("gate.weight", count, shape.hidden, dtype=torch.float32)
    shared = None
    if shape.shared:
        shared = read_dense(weights.under("shared_experts."), names, shape.hidden, shape.shared, shape.limit)
    return MixtureOfExperts(shape.routing, router, bias, _read_experts(shape, weights, names), shared)


def read_dense(
    weights: ScopedWeights, names: Names, hidden: int, intermediate: int, limit: float | None
) -> FeedForward:
    """A feed-forward whose gate and up projection are stored apart."""
    gate_up = weights.stacked([f"{names.gate}.weight", f"{names.up}.weight"], [intermediate] * 2, hidden)
    return FeedForward(gate_up, weights.take(f"{names.down}.weight", hidden, intermediate), limit)


def _read_experts(shape: MixtureShape, weights: ScopedWeights, names: Names) -> Experts:
    """Copied one by one into their places: the stack is most of a draft's memory, and must not exist twice."""
    count, hidden, intermediate = shape.routing.num_experts, shape.hidden, shape.intermediate
    gate_up = torch.empty(count, 2 * intermediate, hidden, dtype=weights.dtype, device=weights.device)
    down = torch.empty(count, hidden, intermediate, dtype=weights.dtype, device=weights.device)
    for index in range(count):
        expert = weights.under(f"experts.{index}.")
        gate, up = gate_up[index].chunk(2)
        gate.copy_(expert.take(f"{names.gate}.weight", intermediate, hidden))
        up.copy_(expert.take(f"{names.up}.weight", intermediate, hidden))
        down[index].copy_(expert.take(f"{names.down}.weight", hidden, intermediate))
    return Experts(gate_up, down, shape.limit)
