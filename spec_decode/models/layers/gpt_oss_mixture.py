"""Loading GPT-OSS's mixture of experts: biased, with the rows of gate and up alternating in one tensor, in 16
bits or in MXFP4.

Legend: H hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

import torch

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.mxfp4 import take_blocks, widened
from spec_decode.models.checkpoints.store import ScopedWeights
from spec_decode.models.kernels.route_tokens import Routing
from spec_decode.models.layers.moe import Experts, MixtureOfExperts

ALPHA, LIMIT = 1.702, 7.0
"""What an absent swiglu_alpha and swiglu_limit mean."""


def read_gpt_oss_mixture(config: ConfigReader, weights: ScopedWeights, layer: int) -> MixtureOfExperts:
    """Read the router and the experts under the prefix of a layer's feed-forward. Raises CheckpointError for an
    impossible routing."""
    hidden, inner = config.get("hidden_size", int), config.get("intermediate_size", int)
    # transformers renamed the field in its version 5.
    count = config.optional("num_local_experts", int)
    count = config.get("num_experts", int) if count is None else count
    top_k = config.get("num_experts_per_tok", int)
    try:
        # A softmax over the chosen experts: one over all, normalised.
        routing = Routing(num_experts=count, top_k=top_k, scoring="softmax")
    except ValueError as error:
        raise CheckpointError(f"invalid mixture of experts in {config.place}: {error}. Restore the file.") from error
    router, experts = weights.under("router."), weights.under("experts.")
    return MixtureOfExperts(
        routing,
        router.take("weight", count, hidden, dtype=torch.float32),
        torch.zeros(count, dtype=torch.float32, device=weights.device),
        Experts(
            experts.rounded(_read_gate_up(experts, count, 2 * inner, hidden)),
            experts.rounded(_read_down(experts, count, hidden, inner)),
            config.positive("swiglu_limit", LIMIT),
            alpha=config.get("swiglu_alpha", float, ALPHA),
            gate_up_bias=_gate_first(experts.take("gate_up_proj_bias", count, 2 * inner)),
            down_bias=experts.take("down_proj_bias", count, hidden),
        ),
        logit_bias=router.take("bias", count, dtype=torch.float32),
    )


def _read_gate_up(weights: ScopedWeights, count: int, rows: int, columns: int) -> torch.Tensor:
    if not weights.has("gate_up_proj_blocks"):
        return _gate_first(weights.take("gate_up_proj", count, columns, rows).mT)
    # Ordered before they are widened, while they are small.
    blocks, scales = map(_gate_first, take_blocks(weights, "gate_up_proj", count, rows, columns))
    return widened(blocks, scales, weights.dtype, f"{weights.prefix}gate_up_proj in {weights.store.folder}")


def _read_down(weights: ScopedWeights, count: int, rows: int, columns: int) -> torch.Tensor:
    if not weights.has("down_proj_blocks"):
        return weights.take("down_proj", count, columns, rows).mT.contiguous()
    parts = take_blocks(weights, "down_proj", count, rows, columns)
    return widened(*parts, weights.dtype, f"{weights.prefix}down_proj in {weights.store.folder}")


def _gate_first(rows: torch.Tensor) -> torch.Tensor:
    """Return [E, 2 I, ...] with all of the gate above all of up, for rows that alternate."""
    return torch.cat([rows[:, ::2], rows[:, 1::2]], 1)
