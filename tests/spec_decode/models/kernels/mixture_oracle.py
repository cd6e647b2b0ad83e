"""Expected results of the mixture-of-experts ops: one token, row or expert at a time, in Python numbers and fp64."""

import math

import torch

from spec_decode.models.kernels.route_tokens import Routing, route_tokens

SCORE = {
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "softmax": math.exp,
    "sqrtsoftplus": lambda x: math.sqrt(math.log1p(math.exp(x))),
}
PLAIN = {"top_k": 3, "scoring": "sigmoid", "groups": 1, "top_groups": 1, "normalised": True, "scale": 1.5}
ROUTINGS = {
    "sigmoid": (8, {}),
    "softmax": (8, {"scoring": "softmax"}),
    "sqrtsoftplus": (8, {"scoring": "sqrtsoftplus"}),
    "unnormalised": (8, {"normalised": False}),
    "unnormalised_softmax": (11, {"scoring": "softmax", "normalised": False}),
    "one_choice": (8, {"top_k": 1}),
    "all_chosen": (5, {"top_k": 5}),
    "not_a_power_of_two": (37, {"top_k": 6}),
    "groups": (32, {"groups": 4, "top_groups": 2, "top_k": 5}),
    "groups_not_a_power_of_two": (15, {"groups": 5, "top_groups": 3, "top_k": 4}),
    "groups_of_one": (6, {"groups": 6, "top_groups": 4}),
    "one_group_of_many": (12, {"groups": 3, "top_groups": 1}),
}
ORDERS = {
    "one_token": ([[5, 0, 3]], 6),
    "one_choice": ([[2], [0], [2], [1]], 3),
    "all_to_one": ([[4, 4]] * 9, 7),
    "experts_without_rows": ([[6, 1], [1, 6], [3, 1]], 9),
    "one_expert": ([[0], [0]], 1),
    "many_rows": ([[(7 * t + 3 * j * j) % 23 for j in range(4)] for t in range(75)], 23),
    "more_experts_than_a_block": ([[90, 3], [40, 90]], 100),
}


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def route(logits, bias, logit_bias=None, **routing):
    return route_tokens(logits, bias, Routing(num_experts=logits.shape[1], **{**PLAIN, **routing}), logit_bias)


def assert_routed(logits, bias, logit_bias=None, **routing):
    weights, experts = route(logits, bias, logit_bias, **routing)
    raised = logits if logit_bias is None else logits + logit_bias
    wanted = [_route_one(row, bias.tolist(), **{**PLAIN, **routing}) for row in raised.tolist()]
    assert experts.tolist() == [chosen for _, chosen in wanted]
    torch.testing.assert_close(weights, torch.tensor([shares for shares, _ in wanted]), rtol=3e-6, atol=0)


def _route_one(logits, bias, *, top_k, scoring, groups, top_groups, normalised, scale):
    scores = [SCORE[scoring](x) for x in logits]
    if scoring == "softmax":
        scores = [score / math.fsum(scores) for score in scores]
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(logits) // groups
    worth = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -worth[g])[:top_groups]
    chosen = sorted((e for e in range(len(logits)) if e // size in best), key=lambda e: -choice[e])[:top_k]
    total = math.fsum(scores[e] for e in chosen) if normalised else 1.0
    return [scores[e] / total * scale for e in chosen], chosen


def assert_ordered(order, experts, num_experts):
    """experts: a list of each token's choices."""
    flat = [expert for choices in experts for expert in choices]
    rows = sorted(range(len(flat)), key=lambda row: flat[row])
    width = len(experts[0])
    assert order.tokens.tolist() == [row // width for row in rows]
    assert order.places.tolist() == [[rows.index(t * width + j) for j in range(width)] for t in range(len(experts))]
    assert order.ends.tolist() == [sum(f <= e for f in flat) for e in range(num_experts)]
    assert [part.dtype for part in order] == [torch.int64, torch.int64, torch.int32]


def combine_inputs(tokens, top_k, width, dtype, *, shared):
    """Return eighths and quarters, whose sums fp32 holds exactly: any result but the sum rounded once is wrong."""
    generator = torch.Generator().manual_seed(tokens * 100 + width)

    def draw(*shape, parts):
        return torch.randint(-99, 100, shape, generator=generator) / parts

    places = torch.randperm(tokens * top_k, generator=generator).view(tokens, top_k)
    rows = draw(tokens * top_k, width, parts=8).to(dtype)
    return rows, draw(tokens, top_k, parts=4), places, draw(tokens, width, parts=64).to(dtype) if shared else None


def combined(rows, weights, places, shared):
    total = torch.einsum("tj,tjh->th", weights.double(), rows.double()[places])
    return (total if shared is None else total + shared.double()).to(rows.dtype)
