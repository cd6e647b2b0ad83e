"""Every published kind of draft, drafting over paged caches, compared with dense attention over whole texts."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from attn_backends import get
from builders import AttentionKind, RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, VerifiedTokens
from spec_decode.model_api import TokenBias
from spec_decode.models.load import load_with_tokens
from spec_decode.paged.kv_groups import GroupOptions, layer_groups_of, make_group
from tests.factories import CPU, owned_pages
from tests.spec_decode.models import generated_mtp, oracle
from tests.spec_decode.models.generated import (
    HIDDEN,
    VOCAB,
    Generated,
    ProductTarget,
    make_causal,
    make_dflash,
    make_dflash2,
    make_eagle,
    make_eagle3,
    make_latent_eagle3,
)
from tests.spec_decode.models.generated_mtp import (
    GLM_CONFIG,
    GLM_FLASH_CONFIG,
    MIMO_CONFIG,
    QWEN_CONFIG,
    QWEN_MOE_CONFIG,
    QWEN_TEXT,
    V3_CONFIG,
    V4_CONFIG,
    make_mtp,
    make_v4,
)

K, PAGE, MAX_SEQ_LEN = 4, 4, 48
CONTEXTS, ACCEPTED = [1, 9, 25], [K, 0, 2]

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@dataclass
class Case:
    """A checkpoint, what the published model makes of it, and its target's sizes.

    layers  of each its window, None for none; of a block's also whether it is causal
    same_tokens  whether the target is known to have the draft's tokens
    """

    checkpoint: Generated
    oracle: Any
    target: dict[str, Any] = field(default_factory=dict)
    layers: list[Any] = field(default_factory=lambda: [None])
    same_tokens: bool = False


def states(count, width=HIDDEN):
    return {"target_states_size": count * width, "hidden_size": width}


TWO_STATES, THREE_STATES = states(2), states(3)


def eagle3(layers=1, target=THREE_STATES, make=make_eagle3, of=oracle.Eagle3, **options):
    return Case(make(num_hidden_layers=layers, **options), of, target, [None] * layers)


def latent_eagle3(**options):
    return eagle3(make=make_latent_eagle3, of=oracle.LatentEagle3, **options)


def causal(architecture="LlamaForCausalLM", layers=(None, None), **options):
    return Case(make_causal(architecture, **options), oracle.Causal, layers=list(layers))


def mtp(of, config, make=make_mtp, **options):
    streams = config.get("hc_mult", 1)
    sizes = {"vocab_size": generated_mtp.VOCAB, "target_states_size": streams * generated_mtp.HIDDEN}
    return Case(make(config, **options), of, sizes)


WIDE = {"own_embedding": True, "target_hidden": 48, "target": states(3, 48)}
CASES = {
    "eagle": Case(make_eagle(), oracle.Eagle),
    "eagle_with_all_that_is_optional": Case(make_eagle(fc_bias=True, own_embedding=True), oracle.Eagle),
    "eagle_of_two_layers": Case(make_eagle(num_hidden_layers=2, qkv_bias=True), oracle.Eagle, layers=[None] * 2),
    "eagle_multi_head_wide_heads": Case(make_eagle(num_key_value_heads=4, head_dim=16), oracle.Eagle),
    "eagle3": eagle3(rope_scaling=LLAMA3),
    "eagle3_of_the_targets_vocabulary": eagle3(draft_vocab=None),
    "eagle3_with_a_norm_before_fc": eagle3(norm_before_fc=True),
    "eagle3_with_nvidias_norm_before_fc": eagle3(eagle_config={"norm_before_fc": True}),
    "eagle3_of_two_layers": eagle3(layers=2, qkv_bias=True),
    "eagle3_1": eagle3(fc_norm=True, norm_output=True),
    "eagle3_1_that_feeds_its_normed_states_back_alone": eagle3(layers=2, norm_output=True),
    "eagle3_1_with_nvidias_flags_and_two_states": eagle3(
        target=TWO_STATES,
        num_states=2,
        norm_before_fc=True,
        eagle_config={"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 4]},
    ),
    "eagle3_of_five_states": eagle3(
        target=states(5), num_states=5, fc_norm=True, eagle_aux_hidden_state_layer_ids=[0, 2, 4, 6, 8]
    ),
    "eagle3_of_another_width": eagle3(
        **WIDE,
        first="layers.0.",
        target_hidden_size=48,
        norm_before_residual=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "latent_eagle3": latent_eagle3(rope_scaling=V3_CONFIG["rope_scaling"]),
    "latent_eagle3_1": latent_eagle3(
        target=TWO_STATES,
        num_states=2,
        fc_norm=True,
        norm_output=True,
        norm_before_residual=True,
        first="layers.0.",
        eagle_aux_hidden_state_layer_ids=[2, 5],
    ),
    "latent_eagle3_of_the_targets_vocabulary": latent_eagle3(draft_vocab=None, q_lora_rank=None),
    "latent_eagle3_of_another_width": latent_eagle3(**WIDE),
    "llama": causal(rope_scaling=LLAMA3),
    "llama_tied_and_biased": causal(
        tie_word_embeddings=True, attention_bias=True, rope_scaling={"type": "linear", "factor": 4}
    ),
    "mistral": causal("MistralForCausalLM", [7, 7], sliding_window=7),
    "qwen2": causal("Qwen2ForCausalLM", sliding_window=7, use_sliding_window=False),
    "qwen3": causal("Qwen3ForCausalLM", head_dim=12),
    "qwen3_with_a_window_in_its_second_layer": causal(
        "Qwen3ForCausalLM", [None, 6], sliding_window=6, use_sliding_window=True, max_window_layers=1
    ),
}
HEADLESS = {
    "eagle3_with_the_targets_head": eagle3(draft_vocab=None, own_head=False),
    "eagle3_with_the_targets_head_and_normed_states": eagle3(draft_vocab=None, own_head=False, norm_output=True),
    "eagle3_with_rows_of_the_targets_head": eagle3(own_head=False),
    "eagle3_tied_to_its_embedding": eagle3(
        draft_vocab=None, own_head=False, own_embedding=True, tie_word_embeddings=True
    ),
    "eagle3_with_rows_of_its_embedding": eagle3(own_head=False, own_embedding=True, tie_word_embeddings=True),
    "eagle3_tied_without_an_embedding": eagle3(draft_vocab=None, own_head=False, tie_word_embeddings=True),
    "latent_eagle3_with_the_targets_head": latent_eagle3(draft_vocab=None, own_head=False),
    "latent_eagle3_with_rows_of_the_targets_head": latent_eagle3(own_head=False),
}
"""Drafts of EAGLE-3 whose checkpoints have no lm_head."""
SILENT_GLM = {name: value for name, value in GLM_CONFIG.items() if name != "partial_rotary_factor"}
PREDICTIONS = {
    "deepseek_v3": mtp(oracle.DeepseekV3, V3_CONFIG, own=True),
    "deepseek_v3_without_a_rank_of_queries": mtp(oracle.DeepseekV3, {**V3_CONFIG, "q_lora_rank": None}),
    "glm_flash": mtp(oracle.DeepseekV3, GLM_FLASH_CONFIG),
    "glm_flash_without_experts": mtp(oracle.DeepseekV3, {**GLM_FLASH_CONFIG, "n_routed_experts": None}),
    "deepseek_v4": mtp(oracle.DeepseekV4, V4_CONFIG, make_v4),
    "deepseek_v4_of_two_streams_in_one_group": mtp(
        oracle.DeepseekV4, {**V4_CONFIG, "hc_mult": 2, "o_groups": 1, "hc_sinkhorn_iters": 1}, make_v4
    ),
    "deepseek_v4_without_a_limit": mtp(oracle.DeepseekV4, {**V4_CONFIG, "swiglu_limit": None}, make_v4),
    "qwen": mtp(oracle.Qwen, QWEN_CONFIG),
    "qwen_of_heads_that_are_rotated_whole": mtp(
        oracle.Qwen,
        {
            **QWEN_TEXT,
            "architectures": ["Qwen3_5ForCausalLM"],
            "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 1.0},
        },
    ),
    "qwen_of_experts": mtp(oracle.Qwen, QWEN_MOE_CONFIG),
    "mimo": mtp(oracle.MiMo, MIMO_CONFIG),
    "glm": mtp(
        oracle.Prediction, {**SILENT_GLM, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1 / 3}}
    ),
    "glm_with_embedding_and_head": mtp(oracle.Prediction, SILENT_GLM, own=True),
}
"""Multi-token prediction of one layer, which drafts step by step as those above do."""
MODULES = {
    f"{name}_of_modules": mtp(partial(oracle.Modules, of), {**config, "num_nextn_predict_layers": K}, own=own)
    for name, of, config, own in (
        ("deepseek_v3", oracle.DeepseekV3, V3_CONFIG, True),
        ("glm_flash", oracle.DeepseekV3, GLM_FLASH_CONFIG, False),
        ("glm", oracle.Prediction, GLM_CONFIG, False),
    )
}
"""Layers of which each drafts a token."""
BLOCKS = {
    "p_eagle": eagle3(mask=(), ptd_token_id=7, rope_scaling=LLAMA3),
    "p_eagle_with_a_norm_for_each_state": eagle3(mask=(1, 1), ptd_token_id=7, fc_norm=True),
    "pard": causal(pard_token=VOCAB - 1),
    "pard_in_a_window": causal("MistralForCausalLM", [7, 7], sliding_window=7, pard_token=3),
}
"""Drafts that predict K tokens in one forward."""

WHOLE = [(None, False)] * 2
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
TIGHT = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}


def dflash(layers=WHOLE, make=make_dflash, of=oracle.DFlash, **options):
    return Case(make(**options), of, TWO_STATES, layers)


def dspark(**options):
    return dflash(of=oracle.DSpark, markov_rank=6, **options)


def dflash2(layers=WHOLE, **options):
    return dflash(layers, make_dflash2, oracle.DFlash2, **options)


def headless(case):
    return replace(case, checkpoint=case.checkpoint.changed(without=["lm_head.weight"]))


CONTEXT_BLOCKS = {
    "dflash": dflash(rope_scaling=LLAMA3),
    "dflash_with_all_that_is_optional": dflash(own_embedding=True, draft_vocab=24, qk_norm=False, head_dim=12),
    "dflash_of_mixed_layers": dflash([(6, True), (None, False)], own_head=True, **MIXED),
    "dflash_of_mixed_layers_without_causality": dflash(
        [(6, False), (None, False)], dflash_config={"causal": False}, **MIXED
    ),
    "dflash_in_windows_of_its_own": dflash([(7, False)] * 2, dflash_config={"use_swa": True, "swa_window_size": 7}),
    "causal_dflash": dflash([(None, True)] * 2, is_causal=True),
    "dflash_with_rows_of_the_targets_head": headless(dflash(draft_vocab=24)),
    "dflash_from_the_anchor": dflash(dflash_config={"sample_from_anchor": True}),
}
"""Drafts that keep the target's states as context."""
DSPARKS = {
    "dspark": dspark(),
    "dspark_with_all_that_is_optional": dspark(
        draft_vocab=24, enable_confidence_head=True, confidence_head_with_markov=True
    ),
    "dspark_after_the_anchor": dspark(sample_from_anchor=False, enable_confidence_head=True, own_embedding=True),
}
"""Those whose places are drafted in turn."""
DFLASH2S = {
    "dflash2": dflash2(rope_scaling=LLAMA3),
    "dflash2_in_windows_narrower_than_its_block": dflash2([(3, False)] * 2, taps=3, group=4, **TIGHT),
    "dflash2_of_mixed_layers_with_all_that_is_optional": dflash2(
        [(6, False), (None, False)],
        **{"taps": 7, "group": 1, "rank": 1, "own_embedding": True, "own_head": True, "qk_norm": False},
        **{"head_dim": 12, **MIXED},
    ),
    "causal_dflash2": dflash2([(None, True)] * 2, is_causal=True, candidates=1),
    "dflash2_from_the_anchor": dflash2(taps=1, candidates=VOCAB, dflash_config={"sample_from_anchor": True}),
}
"""Those that choose among the likeliest tokens of each place."""


def of_first_tokens(case):
    """The same with a map of 24 tokens to the first of both vocabularies."""
    maps = {"d2t": torch.arange(24) // 8, "t2d": torch.arange(case.checkpoint.config["vocab_size"]) % 9 < 8}
    maps["t2d"][26:] = False
    return replace(case, checkpoint=case.checkpoint.changed(tensors=maps))


PADDED = {
    f"{name}_of_{rows}_tokens": replace(
        case, target={**case.target, "vocab_size": VOCAB - rows + VOCAB}, same_tokens=True
    )
    for rows in (VOCAB - 3, VOCAB + 3)
    for name, case in {
        "llama": causal(vocab_size=rows),
        "tied_llama": causal(vocab_size=rows, tie_word_embeddings=True),
        "pard": causal(vocab_size=rows, pard_token=rows - 1),
        "eagle": Case(make_eagle(vocab_size=rows, own_embedding=True), oracle.Eagle),
        "eagle_without_an_embedding": Case(make_eagle(vocab_size=rows), oracle.Eagle),
        "eagle3": eagle3(draft_vocab=None, vocab_size=rows, own_embedding=True),
        "eagle3_of_fewer_tokens": of_first_tokens(eagle3(vocab_size=rows, own_embedding=True)),
        "eagle3_with_the_targets_head": eagle3(draft_vocab=None, vocab_size=rows, own_head=False),
        "tied_eagle3": eagle3(
            draft_vocab=None, vocab_size=rows, own_head=False, own_embedding=True, tie_word_embeddings=True
        ),
        "latent_eagle3": latent_eagle3(draft_vocab=None, vocab_size=rows, own_embedding=True),
        "dflash": dflash(vocab_size=rows, own_embedding=True, own_head=True),
        "dspark": dspark(vocab_size=rows, own_embedding=True, own_head=True),
        "dflash2": dflash2(vocab_size=rows, own_embedding=True),
    }.items()
}
"""Drafts whose vocabulary has fewer rows than the target's, or more: the rest is padding."""


class DraftFixture:
    """Three requests with a prefilled context each, and rounds after it."""

    def __init__(
        self, case, folder, strategy, *, contexts=CONTEXTS, steps=K, device=CPU, dtype=torch.float32,
        backend="torch_reference", **options,
    ):  # fmt: skip
        self.contexts, self.steps, self.device = contexts, steps, device
        self.target = ProductTarget(dtype=dtype, **case.target).to(device)
        self.model = load_with_tokens(
            case.checkpoint.write(folder), self.target, dtype=dtype, device=device, same_tokens=case.same_tokens
        )
        asked, reqs = GroupOptions(page_size=PAGE, tree="tree" in options), len(contexts)
        layer_groups = layer_groups_of(self.model, asked)
        each = MAX_SEQ_LEN // PAGE
        self.pages = [owned_pages(reqs, each, reqs * each, seed) for seed in range(len(layer_groups))]
        self.tables = self.make_tables()
        self.groups = [
            make_group(g.name, get(backend), g.spec, g.layers, num_pages=reqs * each, device=device)
            for g in layer_groups
        ]
        for group in self.groups:
            for cache in group.caches.values():
                # So that a slot that is read before it was written shows.
                cache.key.fill_(torch.nan)
                cache.value.fill_(torch.nan)
        generator, vocab, size = (
            torch.Generator().manual_seed(5),
            self.target.vocab_size,
            self.target.target_states_size,
        )
        self.prompts = [torch.randint(0, vocab, (n,), generator=generator).to(device) for n in contexts]
        self.target_hidden_states = [torch.randn(n, size, generator=generator).to(device, dtype) for n in contexts]
        fields = {
            "token_ids": torch.randint(0, vocab, (reqs, steps + 1), generator=generator),
            "target_hidden_states": torch.randn(reqs, steps + 1, size, generator=generator).to(dtype),
            "context_lens": torch.tensor(contexts, dtype=torch.int32),
            "accepted": torch.tensor(ACCEPTED, dtype=torch.int32).clamp(max=steps),
            "next_tokens": torch.randint(0, vocab, (reqs,), generator=generator),
            "temperature": torch.zeros(reqs),
            "seeds": torch.arange(reqs),
        }
        self.verified = VerifiedTokens(**{name: tensor.to(device) for name, tensor in fields.items()})
        config = DrafterConfig(num_speculative_tokens=steps, strategy=strategy, capture_sizes=[3], **options)
        self.drafter = Drafter(self.model, self.groups, self.tables, config)

    def make_tables(self):
        reqs = len(self.contexts)
        tables = RequestTables(
            page_sizes=[PAGE] * len(self.pages),
            num_pages=[reqs * MAX_SEQ_LEN // PAGE] * len(self.pages),
            max_reqs=reqs,
            max_seq_len=MAX_SEQ_LEN,
            device=self.device,
        )
        tables.load(self.pages, [MAX_SEQ_LEN] * reqs)
        return tables

    def prefill(self):
        prompts, states = torch.cat(self.prompts), torch.cat(self.target_hidden_states)
        self.drafter.prefill(self.make_tables(), self.contexts, self.contexts, prompts, states)

    def drafts(self):
        """Those of the first round."""
        self.prefill()
        return self.drafter.propose(self.verified)

    def go_on(self, num_tokens=None, **changes):
        """Those of a round after the last one, of which nothing but the next token was kept."""
        for request in range(len(self.contexts)):
            ids, self.target_hidden_states[request] = self.inputs(request)
            self.prompts[request] = torch.tensor(ids)
        last = self.verified
        fields = {
            "token_ids": last.token_ids.roll(1, 0),
            "target_hidden_states": last.target_hidden_states.roll(1, 0),
            "context_lens": last.context_lens + last.accepted + 1,
            "accepted": torch.zeros_like(last.accepted),
            "next_tokens": last.next_tokens.roll(1),
            "draft_lens": torch.full_like(last.accepted, self.steps),
        }
        self.verified = last._replace(**{**fields, **changes})
        return self.drafter.propose(self.verified, num_tokens)

    def inputs(self, request):
        """A request's input tokens up to the last kept one's, and their target hidden states."""
        kept = self.verified.accepted[request]
        verified = self.verified
        ids = [*verified.token_ids[request, 1 : kept + 1].tolist(), int(verified.next_tokens[request])]
        target_hidden_states = torch.cat(
            [self.target_hidden_states[request], verified.target_hidden_states[request, : kept + 1]]
        )
        return [*self.prompts[request].tolist(), *ids], target_hidden_states


def assert_published(drafts, fixture, case, min_confidence=0.0):
    """A greedy round is the published model's."""
    steps, models = fixture.steps, {}

    def published(dtype, request):
        if dtype not in models:
            models[dtype] = case.oracle(case.checkpoint, fixture.target, case.layers, dtype)
        return models[dtype].drafts(*fixture.inputs(request), steps)

    for request in range(len(fixture.contexts)):
        scores, sure = published(torch.float64, request)
        stop = next((k + 1 for k in range(steps) if sure[k] < min_confidence), steps)
        wanted = [*scores.argmax(-1).tolist()[:stop], *[-1] * (steps - stop)]
        assert drafts.tokens[request].tolist() == wanted, f"request {request}"
        found, scores = drafts.logits[request, :stop], scores[:stop]
        finite = scores.isfinite()
        assert found.isfinite().equal(finite)
        error = (found - scores)[finite].abs().max() - 1e-5
        # Rounding alone makes the rest, and is looked at only where there is one.
        if not error < 0:
            wide = published(torch.float32, request)[0][:stop]
            assert error < 4 * (wide - scores)[finite].abs().max(), f"request {request}"


EVERY = CASES | HEADLESS | PADDED | PREDICTIONS | MODULES | BLOCKS | CONTEXT_BLOCKS | DSPARKS | DFLASH2S


@pytest.mark.parametrize(
    ("name", "min_confidence"),
    [*((name, 0.0) for name in EVERY), *((name, 0.5) for name in DSPARKS), *((name, 0.6) for name in DFLASH2S)],
)
def test_paged_draft_matches_published_model(name, min_confidence, tmp_path):
    fixture = DraftFixture(EVERY[name], tmp_path, Strategy.FULL_LOOP, min_confidence=min_confidence)
    assert_published(fixture.drafts(), fixture, EVERY[name], min_confidence)


ROUNDS = [
    {},
    {"draft_lens": torch.zeros(3, dtype=torch.int32)},
    {"num_tokens": 0},
    {"temperature": torch.zeros(3)},
    {"temperature": torch.tensor([0.8, 0.0, 1.3]), "draft_lens": torch.tensor([K, 0, 2], dtype=torch.int32)},
]
"""A greedy one, two without drafts, a greedy one, and one with noise of which each request has other lengths."""
_IN_ONE = ("eagle3", "latent_eagle3", "deepseek_v3", "deepseek_v3_of_modules", "p_eagle", "pard")
_IN_ALL = ("eagle", "deepseek_v4", "qwen3_with_a_window_in_its_second_layer")
IN_ROUNDS = {
    **dict.fromkeys((*_IN_ONE, "dspark_after_the_anchor", "dflash2_of_mixed_layers_with_all_that_is_optional"), ()),
    **dict.fromkeys(_IN_ALL, (Strategy.DEVICE_LOOP, Strategy.PER_STEP)),
    "glm": (Strategy.DEVICE_LOOP,),
    "dflash_of_mixed_layers": (Strategy.PER_STEP,),
}
"""One draft of each class, where there is one with layers in two groups, and the strategies beside the full loop. A
draft without later steps is in the same graph whatever the strategy."""


@pytest.mark.parametrize(
    ("name", "min_confidence"),
    [*((name, 0.0) for name in IN_ROUNDS), ("dspark_with_all_that_is_optional", 0.5), ("dflash2", 0.6)],
)
def test_rounds_fill_caches_in_every_strategy(name, min_confidence, tmp_path):
    captured = [Strategy.FULL_LOOP, *IN_ROUNDS.get(name, ())]
    eager, *graphs = (
        DraftFixture(EVERY[name], tmp_path, strategy, min_confidence=min_confidence)
        for strategy in (Strategy.EAGER, *captured)
    )
    for round_, changes in enumerate(ROUNDS):
        wanted, *found = (fixture.go_on(**changes) if round_ else fixture.drafts() for fixture in (eager, *graphs))
        for strategy, drafts in zip(captured, found, strict=True):
            kept = wanted.tokens >= 0
            assert drafts.tokens.equal(wanted.tokens), f"{strategy}, round {round_}"
            assert drafts.logits[kept].equal(wanted.logits[kept]), f"{strategy}, round {round_}"
        count = (wanted.tokens >= 0).sum(-1)
        if round_ == 3:
            assert_published(wanted, eager, EVERY[name], min_confidence)
        elif round_ in (1, 2):
            assert not count.any()
        elif round_ == 4 and not min_confidence:
            assert count.tolist() == [K, 0, 2]


def test_draft_token_uses_noise_of_its_position(tmp_path):
    in_turn, at_once = dspark(sample_from_anchor=False), dflash()
    in_turn.checkpoint.tensors["markov_head.markov_w2.weight"].zero_()
    found = []
    for case in (in_turn, at_once):
        fixture = DraftFixture(case, tmp_path, Strategy.FULL_LOOP)
        fixture.verified = fixture.verified._replace(temperature=torch.full((len(CONTEXTS),), 5.0))
        found.append(fixture.drafts().tokens.clone())
        assert isinstance(fixture.model.place_logits, TokenBias) is (case is in_turn)
    assert torch.equal(*found)


BACKENDS = {
    "latent_eagle3": ("triton_mla", {"kind": AttentionKind.MLA, "head_dim": 48, "out_dim": 32}),
    "deepseek_v3": ("triton_mla", {"kind": AttentionKind.MLA, "head_dim": 48, "out_dim": 32}),
    "deepseek_v4": ("sparse_swa_mla", {"sliding_window": 6, "sinks": True, "out_dim": 64}),
}
"""Backends that serve a draft's attention, and what the draft asks of them."""


@pytest.mark.parametrize("name", BACKENDS)
def test_kernels_agree_with_reference_on_draft_attention(name, tmp_path):
    backend, fields = BACKENDS[name]
    fixture = DraftFixture(EVERY[name], tmp_path, Strategy.FULL_LOOP, backend=backend)
    spec = fixture.groups[0].spec
    assert {field: getattr(spec, field) for field in fields} == fields
    assert_published(fixture.drafts(), fixture, EVERY[name])


WIDE_PARTS = {
    "eagle3": set(),
    "deepseek_v3": {"layers.0.mlp.router", "layers.0.mlp.bias"},
    "qwen": {
        f"{name}.weight"
        for name in ("fuse.embedding_norm", "fuse.state_norm", "layers.0.attention_norm", "layers.0.mlp_norm", "norm",
                     "layers.0.attention.q_norm", "layers.0.attention.k_norm")
    },
    "deepseek_v4": {
        "layers.0.attention.sinks", "layers.0.mlp.router", "layers.0.mlp.bias",
        *(
            f"{part}.{name}"
            for part in ("layers.0.attention_connection", "layers.0.mlp_connection", "head.collapse")
            for name in ("projection", "scale", "base")
        ),
    },
}  # fmt: skip
"""Parameters that stay fp32 in a draft of 16 bits."""


@pytest.mark.parametrize("name", WIDE_PARTS)
def test_bf16_draft_keeps_sensitive_parts_in_fp32(name, tmp_path):
    fixture = DraftFixture(EVERY[name], tmp_path, Strategy.FULL_LOOP, dtype=torch.bfloat16)
    kept = {name for name, parameter in fixture.model.named_parameters() if parameter.dtype != torch.bfloat16}
    assert kept == WIDE_PARTS[name] and fixture.groups[0].spec.dtype == torch.bfloat16
    assert fixture.drafts().tokens.min() >= 0
