"""Every published kind of draft, driven by the drafter over paged caches, against dense attention over whole texts."""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from attn_backends import get
from builders import RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, VerifiedTokens
from spec_decode.models import InTurnBlockDraft
from spec_decode.models.load import load_draft
from spec_decode.paged.kv_groups import make_group
from tests.factories import CPU, owned_pages
from tests.spec_decode.models import oracle
from tests.spec_decode.models.generated import (
    HIDDEN,
    VOCAB,
    Generated,
    StubTarget,
    make_causal,
    make_dflash,
    make_dflash2,
    make_eagle,
    make_eagle3,
    make_latent_eagle3,
)

K, PAGE, MAX_SEQ_LEN = 4, 4, 48
CONTEXTS, ACCEPTED = [1, 9, 25], [K, 0, 2]
STRATEGIES = [Strategy.EAGER, Strategy.PER_STEP, Strategy.FULL_LOOP, Strategy.DEVICE_LOOP]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 12,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}


@dataclass
class Case:
    checkpoint: Generated
    oracle: Any
    target: dict[str, Any] = field(default_factory=dict)
    windows: list[int | None] = field(default_factory=lambda: [None])


THREE_STATES = {"target_states_size": 3 * HIDDEN}
CASES = {
    "eagle": Case(make_eagle(), oracle.Eagle),
    "eagle_with_all_that_is_optional": Case(make_eagle(fc_bias=True, own_embedding=True), oracle.Eagle),
    "eagle_of_two_layers": Case(make_eagle(num_hidden_layers=2, qkv_bias=True), oracle.Eagle, windows=[None] * 2),
    "eagle_multi_head_wide_heads": Case(make_eagle(num_key_value_heads=4, head_dim=16), oracle.Eagle),
    "eagle3": Case(make_eagle3(rope_scaling=LLAMA3), oracle.Eagle3, THREE_STATES),
    "eagle3_of_the_targets_vocabulary": Case(make_eagle3(draft_vocab=None), oracle.Eagle3, THREE_STATES),
    "eagle3_with_a_norm_before_fc": Case(make_eagle3(norm_before_fc=True), oracle.Eagle3, THREE_STATES),
    "eagle3_with_nvidias_norm_before_fc": Case(
        make_eagle3(eagle_config={"norm_before_fc": True}), oracle.Eagle3, THREE_STATES
    ),
    "eagle3_of_two_layers": Case(
        make_eagle3(num_hidden_layers=2, qkv_bias=True), oracle.Eagle3, THREE_STATES, windows=[None] * 2
    ),
    "eagle3_1": Case(make_eagle3(fc_norm=True, norm_output=True), oracle.Eagle3, THREE_STATES),
    "eagle3_1_that_feeds_its_normed_states_back_alone": Case(
        make_eagle3(norm_output=True, num_hidden_layers=2), oracle.Eagle3, THREE_STATES, windows=[None] * 2
    ),
    "eagle3_1_with_nvidias_flags_and_two_states": Case(
        make_eagle3(
            num_states=2,
            norm_before_fc=True,
            eagle_config={"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 4]},
        ),
        oracle.Eagle3,
        {"target_states_size": 2 * HIDDEN},
    ),
    "eagle3_of_five_states": Case(
        make_eagle3(num_states=5, fc_norm=True, eagle_aux_hidden_state_layer_ids=[0, 2, 4, 6, 8]),
        oracle.Eagle3,
        {"target_states_size": 5 * HIDDEN},
    ),
    "eagle3_of_another_width": Case(
        make_eagle3(
            first="layers.0.",
            own_embedding=True,
            target_hidden=48,
            target_hidden_size=48,
            norm_before_residual=True,
            rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        ),
        oracle.Eagle3,
        {"target_states_size": 144, "hidden_size": 48},
    ),
    "latent_eagle3": Case(make_latent_eagle3(rope_scaling=YARN), oracle.LatentEagle3, THREE_STATES),
    "latent_eagle3_1": Case(
        make_latent_eagle3(
            fc_norm=True,
            norm_output=True,
            norm_before_residual=True,
            first="layers.0.",
            num_states=2,
            eagle_aux_hidden_state_layer_ids=[2, 5],
        ),
        oracle.LatentEagle3,
        {"target_states_size": 2 * HIDDEN},
    ),
    "latent_eagle3_of_the_targets_vocabulary": Case(
        make_latent_eagle3(draft_vocab=None, q_lora_rank=None), oracle.LatentEagle3, THREE_STATES
    ),
    "latent_eagle3_of_another_width": Case(
        make_latent_eagle3(own_embedding=True, target_hidden=48),
        oracle.LatentEagle3,
        {"target_states_size": 144, "hidden_size": 48},
    ),
    "llama": Case(make_causal(rope_scaling=LLAMA3), oracle.Causal, windows=[None] * 2),
    "llama_tied_and_biased": Case(
        make_causal(tie_word_embeddings=True, attention_bias=True, rope_scaling={"type": "linear", "factor": 4}),
        oracle.Causal,
        windows=[None] * 2,
    ),
    "mistral": Case(make_causal("MistralForCausalLM", sliding_window=7), oracle.Causal, windows=[7] * 2),
    "qwen2": Case(
        make_causal("Qwen2ForCausalLM", sliding_window=7, use_sliding_window=False), oracle.Causal, windows=[None] * 2
    ),
    "qwen3": Case(make_causal("Qwen3ForCausalLM", head_dim=12), oracle.Causal, windows=[None] * 2),
    "qwen3_with_a_window_in_its_second_layer": Case(
        make_causal("Qwen3ForCausalLM", sliding_window=6, use_sliding_window=True, max_window_layers=1),
        oracle.Causal,
        windows=[None, 6],
    ),
}


BLOCKS = {
    "p_eagle": Case(make_eagle3(mask=(), ptd_token_id=7, rope_scaling=LLAMA3), oracle.Eagle3, THREE_STATES),
    "p_eagle_with_a_norm_for_each_state": Case(
        make_eagle3(mask=(1, 1), ptd_token_id=7, fc_norm=True), oracle.Eagle3, THREE_STATES
    ),
    "pard": Case(make_causal(pard_token=VOCAB - 1), oracle.Causal, windows=[None] * 2),
    "pard_in_a_window": Case(
        make_causal("MistralForCausalLM", sliding_window=7, pard_token=3), oracle.Causal, windows=[7] * 2
    ),
}
"""Drafts that predict K tokens in one forward."""


WHOLE, SLIDING = (None, False), (6, True)
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
TWO_STATES = {"target_states_size": 2 * HIDDEN}
CONTEXT_BLOCKS = {
    "dflash": (make_dflash(rope_scaling=LLAMA3), [WHOLE, WHOLE]),
    "dflash_with_all_that_is_optional": (
        make_dflash(own_embedding=True, draft_vocab=24, qk_norm=False, head_dim=12),
        [WHOLE, WHOLE],
    ),
    "dflash_of_mixed_layers": (make_dflash(own_head=True, **MIXED), [SLIDING, WHOLE]),
    "dflash_of_mixed_layers_without_causality": (
        make_dflash(dflash_config={"causal": False}, **MIXED),
        [(6, False), WHOLE],
    ),
    "dflash_in_windows_of_its_own": (
        make_dflash(dflash_config={"use_swa": True, "swa_window_size": 7}),
        [(7, False), (7, False)],
    ),
    "causal_dflash": (make_dflash(is_causal=True), [(None, True), (None, True)]),
    "dflash_from_the_anchor": (make_dflash(dflash_config={"sample_from_anchor": True}), [WHOLE, WHOLE]),
}
"""Drafts that keep the target's states as context, with each layer's window and whether it is causal."""


class DraftFixture:
    """Three requests with a prefilled context each, and a round after it."""

    def __init__(self, case, folder, strategy, *, device=CPU, backend="torch_reference", **options):
        self.device = device
        self.target = StubTarget(**case.target).to(device)
        self.model = load_draft(case.checkpoint.write(folder), self.target, dtype=torch.float32, device=device)
        layer_groups, reqs = self.model.layer_groups(PAGE), len(CONTEXTS)
        each = MAX_SEQ_LEN // PAGE
        self.tables = self.make_tables(len(layer_groups))
        self.pages = [owned_pages(reqs, each, reqs * each, seed) for seed in range(len(layer_groups))]
        self.groups = [
            make_group(g.name, get(backend), g.spec, g.layers, num_pages=reqs * each, device=device)
            for g in layer_groups
        ]
        for group in self.groups:
            for cache in group.caches.values():
                # So that a slot that is read before it was written shows.
                cache.key.fill_(torch.nan)
                cache.value.fill_(torch.nan)
        generator = torch.Generator().manual_seed(5)
        self.prompts = [torch.randint(0, VOCAB, (n,), generator=generator).to(device) for n in CONTEXTS]
        self.target_hidden_states = [
            torch.randn(n, self.target.target_states_size, generator=generator).to(device) for n in CONTEXTS
        ]
        fields = {
            "token_ids": torch.randint(0, VOCAB, (reqs, K + 1), generator=generator),
            "target_hidden_states": torch.randn(reqs, K + 1, self.target.target_states_size, generator=generator),
            "context_lens": torch.tensor(CONTEXTS, dtype=torch.int32),
            "accepted": torch.tensor(ACCEPTED, dtype=torch.int32),
            "next_tokens": torch.randint(0, VOCAB, (reqs,), generator=generator),
            "temperature": torch.zeros(reqs),
            "seeds": torch.arange(reqs),
        }
        self.verified = VerifiedTokens(**{name: tensor.to(device) for name, tensor in fields.items()})
        self.tables.load(self.pages, [MAX_SEQ_LEN] * reqs)
        config = DrafterConfig(num_speculative_tokens=K, strategy=strategy, capture_sizes=[3], **options)
        self.drafter = Drafter(self.model, self.groups, self.tables, config)

    def make_tables(self, groups):
        reqs = len(CONTEXTS)
        return RequestTables(
            page_sizes=[PAGE] * groups,
            num_pages=[reqs * MAX_SEQ_LEN // PAGE] * groups,
            max_reqs=reqs,
            max_seq_len=MAX_SEQ_LEN,
            device=self.device,
        )

    def drafts(self):
        tables = self.make_tables(len(self.groups))
        tables.load(self.pages, [MAX_SEQ_LEN] * len(CONTEXTS))
        self.drafter.prefill(tables, CONTEXTS, CONTEXTS, torch.cat(self.prompts), torch.cat(self.target_hidden_states))
        return self.drafter.propose(self.verified)

    def inputs(self, request):
        """A request's input tokens up to the last kept one's, and their target hidden states."""
        kept = ACCEPTED[request]
        verified = self.verified
        ids = [*verified.token_ids[request, 1 : kept + 1].tolist(), int(verified.next_tokens[request])]
        target_hidden_states = torch.cat(
            [self.target_hidden_states[request], verified.target_hidden_states[request, : kept + 1]]
        )
        return [*self.prompts[request].tolist(), *ids], target_hidden_states


def drafted(case, folder, strategies=(Strategy.FULL_LOOP,), **options):
    """A fixture and its eager drafts, which these strategies draft too, to the bit."""
    fixture = DraftFixture(case, folder / "eager", Strategy.EAGER, **options)
    drafts = fixture.drafts()
    for strategy in strategies:
        found = DraftFixture(case, folder / strategy.value, strategy, **options).drafts()
        kept = found.tokens >= 0
        assert torch.equal(found.tokens, drafts.tokens), strategy
        assert torch.equal(found.logits[kept], drafts.logits[kept]), strategy
    return fixture, drafts


@pytest.mark.parametrize("name", CASES)
def test_a_draft_over_pages_is_the_published_model_over_whole_texts(name, tmp_path):
    case = CASES[name]
    fixture, drafts = drafted(case, tmp_path, [each for each in STRATEGIES if each is not Strategy.EAGER])
    exact, rounded = (
        case.oracle(case.checkpoint, fixture.target, case.windows, dtype) for dtype in (torch.float64, torch.float32)
    )
    for request in range(len(CONTEXTS)):
        tokens, scores = oracle.greedy(exact, *fixture.inputs(request), K)
        _, wide = oracle.greedy(rounded, *fixture.inputs(request), K)
        finite = scores.isfinite()
        budget = 4 * (wide - scores)[finite].abs().max() + 1e-5
        assert drafts.tokens[request].tolist() == tokens, f"request {request}"
        assert drafts.logits[request].isfinite().equal(finite)
        assert (drafts.logits[request] - scores)[finite].abs().max() < budget, f"request {request}"


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_over_pages_is_the_published_model_over_whole_texts_and_masks(name, tmp_path):
    case = BLOCKS[name]
    fixture, drafts = drafted(case, tmp_path)
    exact, rounded = (
        case.oracle(case.checkpoint, fixture.target, case.windows, dtype) for dtype in (torch.float64, torch.float32)
    )
    mask, states = fixture.model.mask_token_id, fixture.model.mask_hidden
    states = torch.zeros(fixture.target.target_states_size) if states is None else states
    for request in range(len(CONTEXTS)):
        ids, target_states = fixture.inputs(request)
        masked = [*ids, *[mask] * (K - 1)], torch.cat([target_states, states.expand(K - 1, -1)])
        scores, wide = (oracle.block(each, *masked, K) for each in (exact, rounded))
        finite = scores.isfinite()
        budget = 4 * (wide - scores)[finite].abs().max() + 1e-5
        assert drafts.tokens[request].tolist() == scores.argmax(-1).tolist(), f"request {request}"
        assert drafts.logits[request].isfinite().equal(finite)
        assert (drafts.logits[request] - scores)[finite].abs().max() < budget, f"request {request}"


@pytest.mark.parametrize("strategy", [Strategy.EAGER, Strategy.PER_STEP, Strategy.FULL_LOOP])
@pytest.mark.parametrize("name", ["p_eagle", "pard"])
def test_sampled_blocks_are_the_same_in_every_strategy_and_stop_where_they_are_told(name, strategy, tmp_path):
    fixture = DraftFixture(BLOCKS[name], tmp_path, strategy)
    fixture.verified = fixture.verified._replace(
        temperature=torch.tensor([0.8, 0.0, 1.3]), draft_lens=torch.tensor([K, 0, 2], dtype=torch.int32)
    )
    drafts = fixture.drafts()
    eager = DraftFixture(BLOCKS[name], tmp_path / "eager", Strategy.EAGER)
    eager.verified = fixture.verified
    assert torch.equal(drafts.tokens, eager.drafts().tokens)
    assert [sum(token >= 0 for token in row) for row in drafts.tokens.tolist()] == [K, 0, 2]


@pytest.mark.parametrize("name", CONTEXT_BLOCKS)
def test_a_block_after_the_targets_states_is_the_published_model_over_whole_texts(name, tmp_path):
    checkpoint, layers = CONTEXT_BLOCKS[name]
    fixture, drafts = drafted(Case(checkpoint, oracle.DFlash, TWO_STATES), tmp_path)
    exact, rounded = (
        oracle.DFlash(checkpoint, fixture.target, layers, dtype) for dtype in (torch.float64, torch.float32)
    )
    for request in range(len(CONTEXTS)):
        ids, target_states = fixture.inputs(request)
        model = fixture.model
        scores, wide = (
            each.scores(target_states, ids[-1], model.mask_token_id, K, model.first_place) for each in (exact, rounded)
        )
        finite = scores.isfinite()
        budget = 4 * (wide - scores)[finite].abs().max() + 1e-5
        assert drafts.tokens[request].tolist() == scores.argmax(-1).tolist(), f"request {request}"
        assert drafts.logits[request].isfinite().equal(finite)
        assert (drafts.logits[request] - scores)[finite].abs().max() < budget, f"request {request}"


def test_a_token_drafted_in_turn_is_drawn_with_the_noise_of_its_place(tmp_path):
    in_turn, at_once = make_dflash(markov_rank=6, sample_from_anchor=False), make_dflash()
    in_turn.tensors["markov_head.markov_w2.weight"].zero_()
    found = []
    for name, checkpoint in {"in_turn": in_turn, "at_once": at_once}.items():
        fixture = DraftFixture(Case(checkpoint, oracle.DFlash, TWO_STATES), tmp_path / name, Strategy.FULL_LOOP)
        fixture.verified = fixture.verified._replace(temperature=torch.full((len(CONTEXTS),), 5.0))
        found.append(fixture.drafts().tokens.clone())
        assert isinstance(fixture.model, InTurnBlockDraft) is (name == "in_turn")
    assert torch.equal(*found)


DSPARKS = {
    "dspark": make_dflash(markov_rank=6),
    "dspark_with_all_that_is_optional": make_dflash(
        markov_rank=6, draft_vocab=24, enable_confidence_head=True, confidence_head_with_markov=True
    ),
    "dspark_after_the_anchor": make_dflash(
        markov_rank=6, sample_from_anchor=False, enable_confidence_head=True, own_embedding=True
    ),
}


@pytest.mark.parametrize("min_confidence", [0.0, 0.5])
@pytest.mark.parametrize("name", DSPARKS)
def test_a_block_drafted_in_turn_is_the_published_model_over_whole_texts(name, min_confidence, tmp_path):
    checkpoint = DSPARKS[name]
    case = Case(checkpoint, oracle.DFlash, TWO_STATES)
    fixture, drafts = drafted(case, tmp_path, min_confidence=min_confidence)
    exact = oracle.DFlash(checkpoint, fixture.target, [WHOLE, WHOLE], torch.float64)
    for request in range(len(CONTEXTS)):
        ids, target_states = fixture.inputs(request)
        scores, confidences = exact.in_turn(target_states, ids[-1], fixture.model.mask_token_id, K)
        if fixture.model.confidence is None:
            confidences = scores.softmax(-1).amax(-1)
        stops = next((k + 1 for k in range(K) if confidences[k] < min_confidence), K)
        wanted = [*scores.argmax(-1).tolist()[:stops], *[-1] * (K - stops)]
        assert drafts.tokens[request].tolist() == wanted, f"request {request}"
        finite = scores[:stops].isfinite()
        assert (drafts.logits[request, :stops] - scores[:stops])[finite].abs().max() < 1e-3, f"request {request}"


TIGHT = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
DFLASH2S = {
    "dflash2": (make_dflash2(rope_scaling=LLAMA3), [WHOLE, WHOLE]),
    "dflash2_in_windows_narrower_than_its_block": (make_dflash2(taps=3, group=4, **TIGHT), [(3, False)] * 2),
    "dflash2_of_mixed_layers_with_all_that_is_optional": (
        make_dflash2(taps=7, group=1, rank=1, own_embedding=True, own_head=True, qk_norm=False, head_dim=12, **MIXED),
        [(6, False), WHOLE],
    ),
    "causal_dflash2": (make_dflash2(is_causal=True, candidates=1), [(None, True), (None, True)]),
    "dflash2_from_the_anchor": (
        make_dflash2(taps=1, candidates=VOCAB, dflash_config={"sample_from_anchor": True}),
        [WHOLE, WHOLE],
    ),
}
"""Drafts that choose among the likeliest tokens of each place, with each layer's window and whether it is causal."""


@pytest.mark.parametrize("min_confidence", [0.0, 0.6])
@pytest.mark.parametrize("name", DFLASH2S)
def test_a_block_chosen_among_candidates_is_the_published_model_over_whole_texts(name, min_confidence, tmp_path):
    checkpoint, layers = DFLASH2S[name]
    case = Case(checkpoint, oracle.DFlash2, TWO_STATES)
    fixture, drafts = drafted(case, tmp_path, min_confidence=min_confidence)
    exact, rounded = (
        oracle.DFlash2(checkpoint, fixture.target, layers, dtype) for dtype in (torch.float64, torch.float32)
    )
    for request in range(len(CONTEXTS)):
        ids, target_states = fixture.inputs(request)
        (scores, confidences), (wide, _) = (
            each.in_turn(target_states, ids[-1], fixture.model.mask_token_id, K) for each in (exact, rounded)
        )
        stops = next((k + 1 for k in range(K) if confidences[k] < min_confidence), K)
        wanted = [*scores.argmax(-1).tolist()[:stops], *[-1] * (K - stops)]
        assert drafts.tokens[request].tolist() == wanted, f"request {request}"
        finite = scores.isfinite()
        budget = 4 * (wide - scores)[finite].abs().max() + 1e-5
        assert drafts.logits[request].isfinite().equal(finite)
        assert (drafts.logits[request] - scores)[finite].abs().max() < budget, f"request {request}"


@pytest.mark.parametrize("strategy", [Strategy.PER_STEP, Strategy.FULL_LOOP])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DFLASH2S)
def test_candidates_chosen_in_a_graph_are_those_of_eager_rounds_bit_for_bit(name, temperature, strategy, tmp_path):
    def two_rounds(strategy, folder):
        fixture = DraftFixture(Case(DFLASH2S[name][0], oracle.DFlash2, TWO_STATES), folder, strategy)
        first = fixture.verified._replace(temperature=torch.full((len(CONTEXTS),), temperature))
        for next_tokens in (first.next_tokens, first.next_tokens.roll(1)):
            fixture.verified = first._replace(next_tokens=next_tokens)
            drafts = fixture.drafts()
        return drafts

    found, wanted = two_rounds(strategy, tmp_path / "graph"), two_rounds(Strategy.EAGER, tmp_path / "eager")
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.logits, wanted.logits)
    assert (found.tokens >= 0).all() and found.logits.isfinite().sum(-1).eq(
        DFLASH2S[name][0].config["dflash_config"]["selector_top_k"]
    ).all()


OF_EVERY_KIND = {
    **{name: CASES[name] for name in ("eagle", "eagle3", "qwen3_with_a_window_in_its_second_layer")},
    **{name: BLOCKS[name] for name in ("p_eagle", "pard")},
    **{name: Case(CONTEXT_BLOCKS[name][0], oracle.DFlash, TWO_STATES) for name in ("dflash", "causal_dflash")},
    **{name: Case(DSPARKS[name], oracle.DFlash, TWO_STATES) for name in ("dspark", "dspark_after_the_anchor")},
    "dflash2": Case(DFLASH2S["dflash2"][0], oracle.DFlash2, TWO_STATES),
}


def fourth_round(fixture, asked):
    """The drafts of a round after two in which none were asked for, in one way or the other, or after two like it."""
    fixture.drafts()
    for round_ in range(1, 4):
        none = asked if round_ < 3 else None
        grown = fixture.verified.context_lens + fixture.verified.accepted + 1
        fixture.verified = fixture.verified._replace(
            token_ids=fixture.verified.token_ids.roll(round_, 0),
            context_lens=grown,
            accepted=torch.zeros_like(grown),
            next_tokens=fixture.verified.next_tokens.roll(1),
            draft_lens=torch.full_like(grown, 0 if none == "lengths" else K),
        )
        drafts = fixture.drafter.propose(fixture.verified, 0 if none == "num_tokens" else None)
        if none:
            assert (drafts.tokens == -1).all()
    return drafts


@pytest.fixture(scope="module")
def never(tmp_path_factory):
    """By the name of a draft, its fourth round after three that drafted."""

    @functools.cache
    def of(name):
        return fourth_round(DraftFixture(OF_EVERY_KIND[name], tmp_path_factory.mktemp(name), Strategy.EAGER), None)

    return of


@pytest.mark.parametrize("asked", ["lengths", "num_tokens"])
@pytest.mark.parametrize(
    ("name", "strategy"),
    [(n, s) for n in OF_EVERY_KIND for s in STRATEGIES if n in CASES or s is not Strategy.DEVICE_LOOP],
)
def test_a_draft_of_any_kind_goes_on_after_rounds_without_drafts_as_if_there_were_none(
    name, strategy, asked, never, tmp_path
):
    found, wanted = fourth_round(DraftFixture(OF_EVERY_KIND[name], tmp_path, strategy), asked), never(name)
    assert (wanted.tokens >= 0).all()
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.logits, wanted.logits)
