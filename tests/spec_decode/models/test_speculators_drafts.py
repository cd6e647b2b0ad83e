"""Drafts as the library `speculators` writes them, over pages, against what its own forward drafted: see make.py."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from attn_backends import get
from builders import RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, VerifiedTokens
from spec_decode.engine import Engine
from spec_decode.models import CheckpointError
from spec_decode.models.load import aux_hidden_state_layers, load_draft
from spec_decode.paged import GraphMode
from spec_decode.paged.kv_groups import make_group
from tests.factories import CPU, engine_config, make_request
from tests.spec_decode.models.generated import StubTarget

FOLDERS = Path(__file__).parent / "speculators_drafts"
DRAFTS = sorted(path.parent.name for path in FOLDERS.glob("*/round.safetensors"))
KEPT, PAGE, MAX_SEQ_LEN, TARGET_LAYERS = 2, 4, 32, 6


def recorded(name):
    return load_file(FOLDERS / name / "round.safetensors")


def target_of(name):
    """The target that a draft was made for, as far as it reads it."""
    found = recorded(name)
    vocab, hidden = found["embed"].shape
    states_size = found["target_hidden_states"].shape[1]
    target = StubTarget(vocab_size=vocab, hidden_size=hidden, target_states_size=states_size)
    target.num_layers = TARGET_LAYERS
    target.embed.weight = nn.Parameter(found["embed"], requires_grad=False)
    if "lm_head" in found:
        target.lm_head.weight = nn.Parameter(found["lm_head"], requires_grad=False)
    return target


def load(name):
    return load_draft(FOLDERS / name, target_of(name), dtype=torch.float32)


def make_tables(groups):
    tables = RequestTables(
        page_sizes=[PAGE] * groups,
        num_pages=[MAX_SEQ_LEN // PAGE] * groups,
        max_reqs=1,
        max_seq_len=MAX_SEQ_LEN,
        device=CPU,
    )
    tables.load([[list(range(MAX_SEQ_LEN // PAGE))]] * groups, [MAX_SEQ_LEN])
    return tables


def strategies(name):
    at_once = load(name).drafts_at_once
    return [Strategy.PER_STEP, Strategy.FULL_LOOP, *([] if at_once else [Strategy.DEVICE_LOOP])]


def drafts(name, strategy, temperature=0.0, min_confidence=0.0):
    """A round after the recorded text, of which all but the last KEPT + 1 tokens are a prompt."""
    found, model = recorded(name), load(name)
    ids, states, steps = found["token_ids"], found["target_hidden_states"], len(found["tokens"])
    context = len(ids) - 1 - KEPT
    layer_groups = model.layer_groups(PAGE)
    groups = [
        make_group(g.name, get("torch_reference"), g.spec, g.layers, num_pages=MAX_SEQ_LEN // PAGE, device=CPU)
        for g in layer_groups
    ]
    config = DrafterConfig(
        num_speculative_tokens=steps, strategy=strategy, capture_sizes=[1], min_confidence=min_confidence
    )
    drafter = Drafter(model, groups, make_tables(len(groups)), config)
    drafter.prefill(make_tables(len(groups)), [context], [context], ids[:context], states[:context])
    token_ids = torch.zeros(1, steps + 1, dtype=torch.int64)
    token_ids[0, 1 : KEPT + 1] = ids[context : context + KEPT]
    verified = torch.zeros(1, steps + 1, states.shape[1])
    verified[0, : KEPT + 1] = states[context:]
    return drafter.propose(
        VerifiedTokens(
            token_ids=token_ids,
            target_hidden_states=verified,
            context_lens=torch.tensor([context], dtype=torch.int32),
            accepted=torch.tensor([KEPT], dtype=torch.int32),
            next_tokens=ids[-1:],
            temperature=torch.tensor([temperature]),
            seeds=torch.tensor([7]),
        )
    )


CAPTURED = [(name, strategy) for name in DRAFTS for strategy in strategies(name)]


@functools.cache
def eager_drafts(name, temperature):
    return drafts(name, Strategy.EAGER, temperature)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_round_is_the_one_that_the_librarys_own_forward_drafts(name):
    found, drafted, token_map = recorded(name), eager_drafts(name, 0.0), load(name).token_map
    assert drafted.tokens[0].tolist() == found["tokens"].tolist()
    logits = drafted.logits[0] if token_map is None else drafted.logits[0][:, token_map]
    scored = found["logits"].isfinite()
    # The library summed on another processor: the last bits of a logit near 10 are not ours.
    torch.testing.assert_close(logits[scored], found["logits"][scored], rtol=1e-5, atol=1e-5)
    assert int(drafted.logits[0].isfinite().sum()) == int(scored.sum()) and logits.isfinite().equal(scored)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "strategy"), CAPTURED)
def test_every_strategy_drafts_what_eager_drafts_bit_for_bit(name, strategy, temperature):
    found, wanted = drafts(name, strategy, temperature), eager_drafts(name, temperature)
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.logits, wanted.logits)


@pytest.mark.parametrize("name", [name for name in DRAFTS if "confidences" in recorded(name)])
def test_a_draft_stops_where_the_librarys_own_is_unsure(name):
    found = recorded(name)
    confidences, tokens = found["confidences"], found["tokens"].tolist()
    ordered = confidences.sort().values
    for threshold in (*((ordered[1:] + ordered[:-1]) / 2).tolist(), float(ordered[-1]) + 1e-4):
        stops = next(place for place, sure in enumerate(confidences >= threshold) if not sure) + 1
        drafted = drafts(name, Strategy.FULL_LOOP, min_confidence=threshold).tokens[0].tolist()
        assert drafted == [*tokens[:stops], *[-1] * (len(tokens) - stops)], threshold


def target_model(layers):
    """A small target with random weights, which hands out the states that enter these layers."""
    transformers = pytest.importorskip("transformers")
    from spec_decode.models.hf.target import TransformersTarget

    torch.manual_seed(3)
    sizes = {
        "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    for parameter in model.parameters():
        parameter.data.mul_(1 if parameter.dim() == 1 else 8)
    return TransformersTarget(model, aux_hidden_state_layers=layers)


def texts(target, draft=None, steps=0):
    """Eagerly: what a graph of a round drafts is what eager drafts."""
    config = engine_config(
        num_speculative_tokens=steps, max_num_seqs=2, max_model_len=48, page_size=16, graph_mode=GraphMode.NONE
    )
    engine = Engine(target, draft, get("torch_reference"), config)
    requests = [make_request(prompt=prompt, max_tokens=8, seed=1) for prompt in ([1, 5, 9], [2], [7, 7, 3, 0])]
    return [generation.token_ids for generation in engine.generate(requests)]


@pytest.fixture(scope="module")
def plain():
    """What plain decoding says: the same whichever states the target hands out."""
    found = texts(target_model([0]))
    assert len({tuple(text) for text in found}) == 3
    return found


@pytest.mark.parametrize("name", DRAFTS)
def test_a_greedy_text_is_what_plain_decoding_says(name, plain):
    target = target_model(aux_hidden_state_layers(FOLDERS / name, TARGET_LAYERS))
    draft = load_draft(FOLDERS / name, target, dtype=torch.float32)
    assert texts(target, draft, 4) == plain


def altered(name, folder, changes):
    """The draft with other fields in its config.json, None for fields left out."""
    shutil.copytree(FOLDERS / name, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for place, value in changes.items():
        *sections, field = place.split(".")
        inner = config
        for section in sections:
            inner = inner[section]
        inner[field] = value
    path.write_text(json.dumps(config))
    return folder


def test_the_layers_are_those_that_the_states_enter_whatever_the_list_begins_with(tmp_path):
    assert aux_hidden_state_layers(FOLDERS / "eagle3", TARGET_LAYERS) == (1, 3, 5)
    assert aux_hidden_state_layers(FOLDERS / "dflash", TARGET_LAYERS) == (1, 4)
    others = altered("eagle3", tmp_path / "others", {"speculators_model_type": None})
    assert aux_hidden_state_layers(others, TARGET_LAYERS) == (2, 4, 6)


@pytest.mark.parametrize("name", [name for name in DRAFTS if aux_hidden_state_layers(FOLDERS / name, TARGET_LAYERS)])
def test_a_target_that_hands_out_the_states_of_other_layers_is_refused(name):
    target = target_of(name)
    layers = aux_hidden_state_layers(FOLDERS / name, TARGET_LAYERS)
    target.aux_hidden_state_layers = tuple(layer + 1 for layer in layers)
    with pytest.raises(CheckpointError) as refused:
        load_draft(FOLDERS / name, target, dtype=torch.float32)
    assert f"that enter layers {list(layers)}, this target returns those that enter {[x + 1 for x in layers]}" in str(
        refused.value
    )


TOO_DEEP = "must list layers of the target, 0 to 6, got "
WRONG = {
    "no layers": ("dflash", {"aux_hidden_state_layer_ids": None}, "none of .*, aux_hidden_state_layer_ids is there"),
    "an empty list": (
        "dflash",
        {"aux_hidden_state_layer_ids": []},
        rf"^aux_hidden_state_layer_ids in .*{TOO_DEEP}\[\]",
    ),
    "layers beyond": ("dflash", {"aux_hidden_state_layer_ids": [1, 7]}, rf"^aux_hidden_.* {TOO_DEEP}\[1, 7\]"),
    "layers beyond an EAGLE-3's": (
        "eagle3",
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]},
        rf"^eagle_aux_hidden_state_layer_ids in .* {TOO_DEEP}\[1, 3, 7\]",
    ),
    "layers that are no numbers": (
        "dspark",
        {"aux_hidden_state_layer_ids": [1, "4"]},
        rf"^aux_hidden_.* {TOO_DEEP}\[1, '4'\]",
    ),
    "no mask": ("dflash", {"mask_token_id": None}, "a DFlash draft predicts masks"),
    "no mask of a P-EAGLE": ("peagle", {"mask_token_id": None}, "it holds mask_hidden"),
    "no layer config": ("dflash", {"transformer_layer_config": None}, "must say transformer_layer_config, an object"),
    "a list for a layer config": (
        "eagle3",
        {"transformer_layer_config": []},
        "transformer_layer_config in .* an object",
    ),
    "no size": (
        "dflash",
        {"transformer_layer_config.hidden_size": None},
        r"^transformer_layer_config in .*config\.json must say hidden_size",
    ),
    "too few layer types": (
        "dflash_mixed",
        {"transformer_layer_config.layer_types": ["full_attention"]},
        r"^layer_types in transformer_layer_config in .* for each of 2 layers",
    ),
    "a window of no width": (
        "dflash_mixed",
        {"transformer_layer_config.use_sliding_window": False, "transformer_layer_config.sliding_window": None},
        "^transformer_layer_config in .* must say how wide it is",
    ),
    "a rotation for each kind of layer": (
        "dflash_mixed",
        {"transformer_layer_config.rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
        "^rope_parameters in .* must be one for all layers, got one for sliding_attention",
    ),
    "causality that is no truth value": ("dflash_mixed", {"sliding_window_non_causal": "no"}, "^sliding_window_non_ca"),
    "an anchor that is no truth value": ("dflash", {"sample_from_anchor": 1}, "^sample_from_anchor in "),
    "a head that is gated": ("dspark_gated", {}, "^markov_head_type in .* must be 'vanilla', got 'gated'"),
    "a head of another rank": (
        "dspark",
        {"markov_rank": 5},
        r"^markov_head\.markov_w1\.weight in .* must be \[24, 5\]",
    ),
    "a head that is denied": ("dspark", {"enable_confidence_head": False}, "no place for: confidence_head"),
    "another width": (
        "dflash",
        {"target_hidden_size": 48},
        "shares its target's target_hidden_size, .* has 48 and the",
    ),
    "another vocabulary": ("dflash", {"transformer_layer_config.vocab_size": 30}, "vocab_size, .* has 30 and the targ"),
    "no draft vocabulary": ("dflash", {"draft_vocab_size": None}, r"^d2t in .* must be \[24\], got \[15\]"),
    "a type that is no name": (
        "eagle3",
        {"speculators_model_type": 3},
        "^speculators_model_type in .* a string, got 3",
    ),
}


@pytest.mark.parametrize(("name", "changes", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_refused_by_its_name(name, changes, says, tmp_path):
    folder, target = altered(name, tmp_path / "draft", changes), target_of(name.removesuffix("_gated"))
    with pytest.raises(CheckpointError, match=says) as refused:
        load_draft(folder, target, dtype=torch.float32)
    assert str(folder) in str(refused.value)
