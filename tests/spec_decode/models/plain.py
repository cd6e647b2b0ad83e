"""The formulas that the oracles of multi-token prediction share, in fp64 and one token and expert at a time."""

import torch
from torch.nn.functional import silu, softplus


def in_fp64(tensors, prefix):
    """Tensors under the prefix by the rest of their names, as they are stored, in fp64."""
    return {name.removeprefix(prefix): t.double() for name, t in tensors.items() if name.startswith(prefix)}


def rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turn(x, angles):
    """x [T, ..., 2 n] with adjacent pairs turned by angles [T, n], as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    angles = angles.view(angles.shape[0], *[1] * (x.dim() - 2), -1)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def mixture(x, config, weight, names, bias, *, limit=float("inf")):
    """x [T, H] through the experts that each token chooses and the shared one."""
    score = {"sigmoid": torch.sigmoid, "sqrtsoftplus": lambda v: softplus(v).sqrt()}[
        config.get("scoring_func", "sigmoid")
    ]
    out = []
    for row, shared in zip(x, gated(x, weight, "shared_experts.", names, limit), strict=True):
        scores = score(weight["gate.weight"] @ row)
        choice = choose(scores + weight[bias], config)
        shares = scores[choice] / scores[choice].sum() * config["routed_scaling_factor"]
        chosen = [gated(row, weight, f"experts.{expert}.", names, limit) for expert in choice]
        out.append(shared + shares @ torch.stack(chosen))
    return torch.stack(out)


def choose(scores, config):
    """The best experts among those of the best groups."""
    groups = scores.view(config.get("n_group", 1), -1)
    ranked = sorted(range(len(groups)), key=lambda g: -sum(sorted(groups[g].tolist())[-2:]))
    allowed = [g * groups.shape[1] + i for g in ranked[: config.get("topk_group", 1)] for i in range(groups.shape[1])]
    return sorted(allowed, key=lambda e: -float(scores[e]))[: config["num_experts_per_tok"]]


def gated(x, weight, prefix, names, limit=float("inf")):
    """x [..., H] through one expert."""
    gate, up, down = (weight[f"{prefix}{name}.weight"].T for name in names)
    return (silu((x @ gate).clamp(max=limit)) * (x @ up).clamp(-limit, limit)) @ down
