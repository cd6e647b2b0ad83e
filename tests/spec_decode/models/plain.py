"""Formulas shared by oracles, one head, or one token or expert, at a time, in the dtype of their inputs."""

import math

import torch
from torch.nn.functional import silu, softplus


def under(tensors, prefix, dtype=torch.float64):
    """Return the tensors under the prefix, by the rest of their names, as stored, in this dtype."""
    return {name.removeprefix(prefix): t.to(dtype) for name, t in tensors.items() if name.startswith(prefix)}


def rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turn(x, angles):
    """Rotate x [T, ..., D]: adjacent pairs of its last dims, as complex numbers, by angles [T, pairs]."""
    pairs = torch.view_as_complex(x[..., -2 * angles.shape[1] :].unflatten(-1, (-1, 2)).contiguous())
    angles = angles.view(angles.shape[0], *[1] * (x.dim() - 2), -1)
    tail = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([x[..., : -tail.shape[-1]], tail], -1)


def turn_halves(x, angles):
    """Rotate x [T, heads, D] by angles [T, pairs]: dims i and i + pairs are the parts of a complex number."""
    real, imaginary, rest = x.tensor_split([angles.shape[1], 2 * angles.shape[1]], -1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag, rest], -1)


def attend(query, key, value, unseen, scale=None):
    """Return [T, heads * Dv] for query [T, heads, D] over key and value [U, kv heads, D or Dv]; unseen bool [T, U]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = []
    for head in range(query.shape[1]):
        shared = head // (query.shape[1] // key.shape[1])
        scores = query[:, head] @ key[:, shared].T * scale
        out.append(scores.masked_fill(unseen, -math.inf).softmax(-1) @ value[:, shared])
    return torch.cat(out, -1)


def attend_latents(query, latent, window, sinks, value_dim):
    """Return [T, heads, value_dim] for query [T, heads, D] over its window of latents [T, D]; sinks [heads] or None."""
    out = torch.zeros(*query.shape[:2], value_dim).to(query)
    for token in range(len(query)):
        seen = latent[max(0, token + 1 - (window or len(query))) : token + 1]
        scores = (query[token] @ seen.T * query.shape[-1] ** -0.5).exp()
        sink = 0.0 if sinks is None else sinks.exp()
        out[token] = scores @ seen[:, :value_dim] / (scores.sum(-1) + sink)[:, None]
    return out


def mixture(x, config, weight, names, bias, *, limit=math.inf):
    """Run x [T, H] through each token's chosen experts and the shared one."""
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
    """Return the best experts within the best groups."""
    groups = scores.view(config.get("n_group", 1), -1)
    ranked = sorted(range(len(groups)), key=lambda g: -sum(sorted(groups[g].tolist())[-2:]))
    allowed = [g * groups.shape[1] + i for g in ranked[: config.get("topk_group", 1)] for i in range(groups.shape[1])]
    return sorted(allowed, key=lambda e: -float(scores[e]))[: config["num_experts_per_tok"]]


def gated(x, weight, prefix, names, limit=math.inf):
    """Run x [..., H] through one expert."""
    gate, up, down = (weight[f"{prefix}{name}.weight"].T for name in names)
    return (silu((x @ gate).clamp(max=limit)) * (x @ up).clamp(-limit, limit)) @ down
