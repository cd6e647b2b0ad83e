"""A draft with latent attention: its layer, its attention without a cache, and the engine that runs it."""

from dataclasses import replace

import pytest
import torch
from train_pair.attention import causal_attention, positions_of, run_target, unrolled_attention
from train_pair.generation import speculate

from attn_backends import Feature, NoBackend, get
from attn_backends.torch_reference import TorchReference
from builders import AttentionKind
from spec_decode.conformance.check import expand
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.model_api import DraftInputs
from spec_decode.models import LatentConfig, LlamaTarget
from spec_decode.paged import GraphMode
from spec_decode.testing.draft_fixture import DraftFixture
from spec_decode.testing.outcome import CheckFailure
from spec_decode.testing.subject import Subject
from tests.factories import CPU, engine_config, make_config, make_latent_config, make_pair, make_request, resampled
from tests.spec_decode.models.plain import attend_latents, rms, turn

REFERENCE = get("torch_reference")
FORMS = {
    "values_are_all_of_the_latent": make_latent_config(),
    "values_leave_rotated_dims_out": make_latent_config(value_dim=24, sliding_window=None),
    "no_sinks": make_latent_config(value_dim=16, sinks=False),
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def config(request):
    return request.param


def make_latent_pair(config=FORMS["values_are_all_of_the_latent"], **options):
    return make_pair(None, config, **options)


def plain_attention(layer, config, x, start):
    """The layer's attention in fp64, by its definition: no shared code, one query and head at a time."""
    weight = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    rope_dim, x = config.latent.rope_dim, x.double()
    frequency = config.rope_theta ** (-2 * torch.arange(rope_dim // 2).double() / rope_dim)
    angles = torch.outer(torch.arange(start, start + len(x)), frequency)
    query = rms(x @ weight["q_a.weight"].T, config.norm_eps) * weight["q_norm.weight"] @ weight["q_b.weight"].T
    query = turn(rms(query.view(len(x), -1, config.head_dim), config.norm_eps), angles)
    latent = turn(rms(x @ weight["kv.weight"].T, config.norm_eps) * weight["kv_norm.weight"], angles)
    out = attend_latents(query, latent, config.sliding_window, weight.get("sinks"), config.value_dim)
    if config.value_dim == config.head_dim:
        out = turn(out, -angles)
    return out.flatten(1) @ weight["out_a.weight"].T @ weight["out_b.weight"].T


@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=pytest.mark.outside_inference_mode)])
def test_latent_layer_matches_definition_and_learns(config, trained):
    draft, x = make_latent_pair(config)[1].requires_grad_(trained), torch.randn(15, config.hidden_size)
    found = draft.layers[0].attend(x, draft.rotary(torch.arange(100, 115)), causal_attention(1, config.sliding_window))
    wanted = plain_attention(draft.layers[0], config, x, start=100)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    assert found.requires_grad is trained
    if trained:
        found.square().sum().backward()
        learnt = {
            name for name, p in draft.layers[0].named_parameters() if p.grad is not None and p.grad.abs().sum() > 0
        }
        matrices = {f"{name}.weight" for name in ("q_a", "q_norm", "q_b", "kv", "kv_norm", "out_a", "out_b")}
        assert learnt == matrices | ({"sinks"} if config.latent.sinks else set())


def test_unrolled_step_sees_same_as_inference():
    target, draft = make_latent_pair()
    config = draft.config
    tokens = torch.randint(0, 24, (1, 13))
    inputs, hidden = tokens[:, 1:], run_target(target, tokens)
    length, positions = inputs.shape[1], positions_of(inputs)
    attention, state, unrolled = unrolled_attention(inputs, config.sliding_window), hidden[:, :-1], []
    for _ in range(4):
        unrolled.append(draft(DraftInputs(inputs.flatten(), state[0], positions, attention)))
        state = torch.nn.functional.pad(unrolled[-1][None, :-1], (0, 0, 1, 0))
    for first in range(length - 3):
        states = hidden[0, :-1].clone()
        for step in range(4):
            whole = draft(DraftInputs(inputs.flatten(), states, positions, causal_attention(1, config.sliding_window)))
            torch.testing.assert_close(unrolled[step][first + step], whole[first + step], rtol=1e-4, atol=1e-5)
            if step < 3:
                states[first + step + 1] = whole[first + step]


PROBLEMS = {
    "num_kv_heads must be 1, got 2": {"num_kv_heads": 2, "num_q_heads": 2},
    "rope_dim must be even, 2 to head_dim 32, got 7": {"latent": LatentConfig(rope_dim=7, q_rank=1, out_rank=1)},
    "rope_dim must be even, 2 to head_dim 32, got 34": {"latent": LatentConfig(rope_dim=34, q_rank=1, out_rank=1)},
    "head_dim - rope_dim = 24, got 28": {"latent": LatentConfig(rope_dim=8, q_rank=1, out_rank=1, value_dim=28)},
    "head_dim - rope_dim = 24, got 0": {"latent": LatentConfig(rope_dim=8, q_rank=1, out_rank=1, value_dim=0)},
    "q_rank must be at least 1, got 0": {"latent": LatentConfig(rope_dim=8, q_rank=0, out_rank=1)},
    "out_rank must be at least 1, got -2": {"latent": LatentConfig(rope_dim=8, q_rank=1, out_rank=-2)},
}


@pytest.mark.parametrize(("message", "changes"), PROBLEMS.items(), ids=PROBLEMS)
def test_impossible_latent_config_is_rejected(message, changes):
    with pytest.raises(ValueError, match=message):
        make_latent_config(**changes)


def test_latent_spec_describes_the_layer(config):
    spec = config.attention_spec(16, torch.bfloat16)
    assert (spec.kind, spec.num_kv_heads, spec.head_dim) == (AttentionKind.MLA, 1, 32)
    assert (spec.out_dim, spec.sinks) == (config.value_dim, config.latent.sinks)
    assert spec.sliding_window == config.sliding_window


def test_a_target_with_latents_is_refused():
    with pytest.raises(ValueError, match="Leave latent out of its config"):
        LlamaTarget(make_latent_config())


def make_engine(
    pair, backend=REFERENCE, *, draft_backend=None, num_speculative_tokens=3, graph_mode=GraphMode.FULL, **options
):
    options = {"max_num_seqs": 3, "max_model_len": 64, "page_size": 4, **options}
    config = engine_config(num_speculative_tokens=num_speculative_tokens, graph_mode=graph_mode, **options)
    return Engine(*pair, backend, config, draft_backend=draft_backend)


def make_requests(**options):
    prompts = ([3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [4, 6])
    return [
        make_request(prompt=p, max_tokens=n, seed=n, **options) for p, n in zip(prompts, (9, 12, 5, 1), strict=True)
    ]


def texts(engine, requests):
    return [generation.token_ids for generation in engine.generate(requests)]


def test_greedy_speculation_matches_plain_decoding(config):
    pair = make_latent_pair(config)
    engine = make_engine(pair, strategy=Strategy.FULL_LOOP)
    plain = make_engine(pair, num_speculative_tokens=0, graph_mode=GraphMode.NONE)
    assert texts(engine, make_requests()) == texts(plain, make_requests())
    assert engine.plan.strategy is Strategy.FULL_LOOP and 0.2 < engine.stats.mean_accepted < 2.8


@pytest.mark.parametrize("form", FORMS)
def test_graphs_match_eager_when_sampling(form):
    """One form in every strategy, and the others in that of the most steps without the host."""

    def generations(strategy):
        found = make_engine(make_latent_pair(FORMS[form]), strategy=strategy).generate(make_requests(temperature=1.0))
        return [(generation.token_ids, generation.accepted) for generation in found]

    others = [Strategy.PER_STEP, Strategy.DEVICE_LOOP] if form == "values_are_all_of_the_latent" else []
    wanted = generations(Strategy.EAGER)
    assert all(generations(strategy) == wanted for strategy in (Strategy.FULL_LOOP, *others))


def test_first_draft_matches_dense_draft_over_prompt(config, monkeypatch):
    target, draft = make_latent_pair(config, context=1.0)
    draft.fuse.weight[:, draft.config.hidden_size :] *= 10
    engine, logits = make_engine((target, draft), max_num_seqs=4, one_graph=False), []
    propose = engine.drafter.propose

    def spy(verified):
        drafts = propose(verified)
        logits.append(drafts.logits.clone())
        return drafts

    monkeypatch.setattr(engine.drafter, "propose", spy)
    requests = [resampled(request, max_tokens=5) for request in make_requests()]
    for request, result, found in zip(requests, engine.generate(requests), logits[0], strict=True):
        hidden = run_target(target, torch.tensor([request.prompt]))[0]
        ids = torch.tensor([*request.prompt[1:], result.token_ids[0]])
        attend = causal_attention(1, config.sliding_window)
        dense = draft.logits(draft(DraftInputs(ids, hidden, torch.arange(len(ids)), attend)))[-1]
        torch.testing.assert_close(found[0], dense, rtol=1e-4, atol=1e-5)


def test_acceptance_matches_pair_without_cache():
    config = make_latent_config(vocab_size=256)
    pair = make_pair(make_config(vocab_size=256, num_q_heads=4), config, context=0.5)
    prompts, rounds = ["aardvark!", "bumblebee", "crocodile"], 8
    kept, _ = speculate(*pair, prompts, rounds, 3)
    engine = make_engine(pair, graph_mode=GraphMode.NONE)
    results = engine.generate([make_request(prompt=encode(prompt), max_tokens=4 * rounds) for prompt in prompts])
    first = [accepted for result in results for accepted in result.accepted[:rounds]]
    assert len(first) == rounds * 3 and 0.2 < kept < 2.5
    assert sum(first) / len(first) == pytest.approx(kept)


def test_target_backend_may_lack_latents():
    pair = make_pair(make_config(hidden_size=64, head_dim=64), make_latent_config(hidden_size=64))
    mixed = make_engine(pair, get("triton_paged"), draft_backend=REFERENCE)
    assert texts(mixed, make_requests()) == texts(make_engine(pair, graph_mode=GraphMode.NONE), make_requests())


def test_draft_backend_without_latents_is_rejected_with_reason():
    pair = make_pair(make_config(hidden_size=64, head_dim=64), make_latent_config(hidden_size=64))
    with pytest.raises(NoBackend, match=r"group draft .* triton_paged rejects it: .*serves mha, not mla"):
        make_engine(pair, get("triton_paged"))


def test_bf16_draft_works_with_fp32_sinks():
    pair = make_latent_pair()
    for model in pair:
        for name, parameter in model.named_parameters():
            if not name.endswith("sinks"):
                parameter.data = parameter.data.bfloat16()
    engine = make_engine(pair)
    assert [len(text) for text in texts(engine, make_requests())] == [9, 12, 5, 1]
    assert engine.stats.mean_accepted > 0.2


def latent_only(**claims):
    class LatentOnly(TorchReference):
        name = "latent_only"
        capabilities = replace(TorchReference.capabilities, kinds=(AttentionKind.MLA,), **claims)

    return LatentOnly()


def drafter_checks(backend, *cases):
    return [check for check in expand(Subject(backend, CPU)) if check.id in cases]


AGREE, PREFIX = "drafter.strategies_agree[k2-n2]", "drafter.steps_attend_to_the_logical_prefix[k4-n3]"
CLAIMS = {
    "all": {},
    "no_sinks_and_one_dim": {"features": frozenset(Feature) - {Feature.SINKS, Feature.VALUE_DIM}},
    "no_window_in_bf16": {"features": frozenset(Feature) - {Feature.SLIDING_WINDOW}, "dtypes": (torch.bfloat16,)},
}


@pytest.mark.parametrize("claims", CLAIMS.values(), ids=CLAIMS)
def test_drafter_checks_run_on_latent_only_backend(claims):
    """Each claim leads to another draft, which all checks of the drafter share."""
    cases = [PREFIX, AGREE] if not claims else [PREFIX]
    checks = drafter_checks(latent_only(**claims), *cases)
    assert len(checks) == len(cases) and all(check() for check in checks)


def test_draft_has_sinks_if_window_is_unclaimed():
    backend = latent_only(**CLAIMS["no_window_in_bf16"])
    spec = DraftFixture.make(Subject(backend, CPU), 1, 1).spec
    assert spec.sinks and spec.sliding_window is None


def no_sinks(self, query, cache, metadata, *, spec, sinks=None):
    assert spec.sinks
    return TorchReference.forward(self, query, cache, metadata, spec=replace(spec, sinks=False))


def other_heads_sinks(self, query, cache, metadata, *, spec, sinks=None):
    return TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks.flip(0))


def no_window(self, query, cache, metadata, *, spec, sinks=None):
    every = replace(metadata, kv_start=torch.zeros_like(metadata.kv_start))
    return TorchReference.forward(self, query, cache, every, spec=spec, sinks=sinks)


def raw_latents(self, latent, norm_rope, cache, metadata):
    return self.write_kv(latent[:, None], latent[:, None], cache, metadata)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [*(("forward", wrong) for wrong in (no_sinks, other_heads_sinks, no_window)),
     ("norm_rope_and_write_latent", raw_latents)],
)  # fmt: skip
def test_drafter_checks_catch_wrong_latent_backend(method, wrong, monkeypatch):
    backend = latent_only()
    monkeypatch.setattr(type(backend), method, wrong, raising=False)
    [check] = drafter_checks(backend, PREFIX)
    with pytest.raises(CheckFailure, match="logical prefix"):
        check()
