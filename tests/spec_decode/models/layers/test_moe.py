"""A mixture of experts against a loop over tokens and experts in fp64, and its routing and products by themselves."""

import pytest
import torch

from spec_decode.graphs import runtime_for
from spec_decode.models.kernels.route_tokens import Routing, route_tokens
from spec_decode.models.kernels.swiglu import swiglu
from spec_decode.models.layers import linear as products
from spec_decode.models.layers.feed_forward import FeedForward
from spec_decode.models.layers.moe import Experts, MixtureOfExperts
from tests.factories import CPU
from tests.spec_decode.models.plain import choose, mixture

HIDDEN, INNER, COUNT, TOP_K = 16, 12, 8, 3
NAMES = ("gate", "up", "down")


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_mixture(limit=None, **routing):
    """The module, its tensors by name, and what an oracle needs to know of it."""
    routing = {"num_experts": COUNT, "top_k": TOP_K, "scale": 1.5, **routing}
    gate_up, down = noise(COUNT, 2 * INNER, HIDDEN) / 3, noise(COUNT, HIDDEN, INNER, seed=1) / 3
    shared = FeedForward(noise(2 * INNER, HIDDEN, seed=2) / 3, noise(HIDDEN, INNER, seed=3) / 3, limit)
    router, bias = noise(COUNT, HIDDEN, seed=4), noise(COUNT, seed=5) / 2
    module = MixtureOfExperts(Routing(**routing), router, bias, Experts(gate_up, down, limit), shared)
    weight = {"gate.weight": router, "bias": bias}
    for prefix, both, out in [("shared_experts.", shared.gate_up, shared.down),
                              *((f"experts.{e}.", gate_up[e], down[e]) for e in range(COUNT))]:  # fmt: skip
        weight |= {
            f"{prefix}gate.weight": both[:INNER],
            f"{prefix}up.weight": both[INNER:],
            f"{prefix}down.weight": out,
        }
    config = {
        "scoring_func": routing.get("scoring", "sigmoid"),
        "n_group": routing.get("groups", 1),
        "topk_group": routing.get("top_groups", 1),
        "num_experts_per_tok": TOP_K,
        "routed_scaling_factor": routing["scale"],
    }
    return module, {name: tensor.double() for name, tensor in weight.items()}, config


FORMS = {
    "sigmoid": {},
    "groups": {"groups": 4, "top_groups": 2},
    "sqrtsoftplus_with_a_limit": {"scoring": "sqrtsoftplus", "limit": 0.3},
}


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_mixture_is_the_weighted_sum_of_the_experts_that_a_token_chooses(form, tokens):
    module, weight, config = make_mixture(**form)
    x = noise(tokens, HIDDEN, seed=6)
    wanted = mixture(x.double(), config, weight, NAMES, "bias", limit=form.get("limit", float("inf")))
    torch.testing.assert_close(module(x).double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_mixture_without_a_shared_expert_is_the_routed_part_alone():
    module, *_ = make_mixture()
    x = noise(5, HIDDEN)
    with_shared, shared = module(x), module.shared(x)
    module.shared = None
    torch.testing.assert_close(module(x), with_shared - shared)


def test_a_token_does_not_depend_on_those_beside_it():
    module, *_ = make_mixture()
    x = noise(9, HIDDEN)
    spoilt = x.clone()
    spoilt[4] = float("nan")
    others = [row for row in range(9) if row != 4]
    assert torch.equal(module(spoilt)[others], module(x)[others])


def test_all_tokens_may_choose_the_same_experts():
    module, weight, config = make_mixture()
    x = noise(1, HIDDEN).expand(20, -1)
    wanted = mixture(x.double(), config, weight, NAMES, "bias")
    torch.testing.assert_close(module(x).double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_mixture_can_be_captured_and_goes_by_what_the_replay_finds():
    module, *_ = make_mixture(groups=4, top_groups=2)
    x, out = torch.zeros(6, HIDDEN), torch.zeros(6, HIDDEN)
    graph = runtime_for(CPU).capture(lambda: out.copy_(module(x)))
    x.copy_(noise(6, HIDDEN))
    graph.replay()
    assert torch.equal(out, module(x))


def test_a_single_token_reads_the_weights_of_its_own_experts_alone():
    module, *_ = make_mixture()
    x = noise(1, HIDDEN)
    _, chosen = route_tokens(x @ module.router.T, module.bias, module.routing)
    with torch.no_grad():
        wanted = module(x)
        others = [expert for expert in range(COUNT) if expert not in chosen[0]]
        assert len(others) == COUNT - TOP_K
        module.experts.gate_up[others] = module.experts.down[others] = torch.nan
        assert torch.equal(module(x), wanted)


def test_routing_takes_the_best_of_the_best_groups():
    routing = Routing(num_experts=12, top_k=4, groups=4, top_groups=2)
    logits, bias = noise(50, 12), noise(12, seed=1)
    weights, experts = route_tokens(logits, bias, routing)
    config = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    for row, found in enumerate(experts.tolist()):
        assert found == choose(logits[row].sigmoid() + bias, config)
    assert {len({e // 3 for e in row}) <= 2 for row in experts.tolist()} == {True}
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))


def test_the_bias_decides_the_choice_and_not_the_weights():
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    routing = Routing(num_experts=3, top_k=1, normalised=False, scale=2.0)
    weights, experts = route_tokens(logits, torch.tensor([0.0, 0.0, 9.0]), routing)
    assert experts.tolist() == [[2]]
    torch.testing.assert_close(weights, 2 * torch.sigmoid(logits[:, 2:]))


@pytest.mark.parametrize(
    ("scoring", "wanted"),
    [("softmax", [0.09, 0.245, 0.665]), ("sigmoid", [0.5, 0.731, 0.881]), ("sqrtsoftplus", [0.833, 1.146, 1.458])],
)
def test_scores_are_those_of_their_name(scoring, wanted):
    routing = Routing(num_experts=3, top_k=3, scoring=scoring, normalised=False)
    weights, experts = route_tokens(torch.tensor([[0.0, 1.0, 2.0]]), torch.zeros(3), routing)
    assert experts.tolist() == [[2, 1, 0]]
    torch.testing.assert_close(weights[0].flip(0), torch.tensor(wanted), rtol=0, atol=6e-4)


ROUTING_PROBLEMS = {
    "sigmoid, softmax, sqrtsoftplus, got 'relu'": {"scoring": "relu"},
    "8 experts in 3 groups": {"groups": 3},
    "in 4 groups, 5 of them": {"groups": 4, "top_groups": 5},
    "1 to 4 of the experts that it may choose from, got 5": {"groups": 4, "top_groups": 2, "top_k": 5},
    "got 0": {"top_k": 0},
}


@pytest.mark.parametrize(("message", "changes"), ROUTING_PROBLEMS.items(), ids=ROUTING_PROBLEMS)
def test_a_routing_that_no_mixture_could_have_is_refused(message, changes):
    with pytest.raises(ValueError, match=message):
        Routing(**{"num_experts": 8, "top_k": 2, **changes})


GROUPS = {
    "some_empty": [0, 3, 3, 7],
    "first_and_last_empty": [0, 0, 7, 7],
    "one_takes_all": [7, 7, 7, 7],
    "one_row_each": [1, 2, 3, 7],
}


def plain_products(rows, weight, ends):
    starts = [0, *ends[:-1]]
    parts = [rows[a:b] @ weight[group].T for group, (a, b) in enumerate(zip(starts, ends, strict=True))]
    return torch.cat(parts)


@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_rows_meet_the_matrix_of_their_group(ends):
    rows, weight = noise(7, 8), noise(4, 16, 8, seed=1)
    found = products.grouped_linear(rows, weight, torch.tensor(ends, dtype=torch.int32))
    torch.testing.assert_close(found, plain_products(rows, weight, ends), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="needs torch 2.10, for the CPU")
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_torchs_grouped_matmul_is_called_as_it_asks_to_be(ends):
    rows, weight = noise(7, 8).bfloat16(), noise(4, 16, 8, seed=1).bfloat16()
    found = products._grouped_mm(rows, weight, torch.tensor(ends, dtype=torch.int32))
    torch.testing.assert_close(found, plain_products(rows, weight, ends), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_tokens_meet_the_gate_and_up_projection_of_their_group(ends, limit):
    x, tokens, weight = noise(3, 8), torch.tensor([2, 0, 0, 1, 2, 1, 0]), noise(4, 16, 8, seed=1)
    found = products.grouped_gated_linear(x, tokens, weight, torch.tensor(ends, dtype=torch.int32), limit)
    wanted = swiglu(plain_products(x[tokens], weight, ends), limit)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
