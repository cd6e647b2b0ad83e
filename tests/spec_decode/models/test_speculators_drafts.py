"""Drafts written by the library `speculators`, over pages, compared with its own forward's drafts: see make.py."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from attn_backends import get
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, VerifiedTokens
from spec_decode.engine import Engine
from spec_decode.models import CheckpointError
from spec_decode.models.load import aux_hidden_state_layers, load_draft
from spec_decode.paged import GraphMode
from spec_decode.paged.kv_groups import make_group
from tests.factories import CPU, engine_config, make_request, make_tables
from tests.spec_decode.models.generated import Generated, StubTarget

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


def drafts(name, strategy, temperature=0.0, min_confidence=0.0):
    """A round after the recorded text, of which all but the last KEPT + 1 tokens are a prompt; and the draft."""
    found, model = recorded(name), load_draft(FOLDERS / name, target_of(name), dtype=torch.float32)
    ids, states, steps = found["token_ids"], found["target_hidden_states"], len(found["tokens"])
    context, pages, layer_groups = len(ids) - 1 - KEPT, MAX_SEQ_LEN // PAGE, model.layer_groups(PAGE)
    groups = [
        make_group(g.name, get("torch_reference"), g.spec, g.layers, num_pages=pages, device=CPU) for g in layer_groups
    ]
    tables = make_tables([MAX_SEQ_LEN], page_sizes=[PAGE] * len(groups), max_seq_len=MAX_SEQ_LEN)
    config = DrafterConfig(
        num_speculative_tokens=steps, strategy=strategy, capture_sizes=[1], min_confidence=min_confidence
    )
    drafter = Drafter(model, groups, tables, config)
    drafter.prefill(tables, [context], [context], ids[:context], states[:context])
    token_ids = torch.zeros(1, steps + 1, dtype=torch.int64)
    token_ids[0, 1 : KEPT + 1] = ids[context : context + KEPT]
    verified = torch.zeros(1, steps + 1, states.shape[1])
    verified[0, : KEPT + 1] = states[context:]
    round_ = VerifiedTokens(
        token_ids=token_ids,
        target_hidden_states=verified,
        context_lens=torch.tensor([context], dtype=torch.int32),
        accepted=torch.tensor([KEPT], dtype=torch.int32),
        next_tokens=ids[-1:],
        temperature=torch.tensor([temperature]),
        seeds=torch.tensor([7]),
    )
    return drafter.propose(round_), model


@pytest.mark.parametrize("name", DRAFTS)
def test_round_matches_forward_of_speculators(name):
    found, (drafted, model) = recorded(name), drafts(name, Strategy.FULL_LOOP)
    assert drafted.tokens[0].tolist() == found["tokens"].tolist()
    logits = drafted.logits[0] if model.token_map is None else drafted.logits[0][:, model.token_map]
    scored = found["logits"].isfinite()
    # The library summed on another processor: the last bits of a logit near 10 are not ours.
    torch.testing.assert_close(logits[scored], found["logits"][scored], rtol=1e-5, atol=1e-5)
    assert int(drafted.logits[0].isfinite().sum()) == int(scored.sum()) and logits.isfinite().equal(scored)


@pytest.mark.parametrize("name", [name for name in DRAFTS if "confidences" in recorded(name)])
def test_draft_stops_below_confidence_like_speculators(name):
    found = recorded(name)
    confidences, tokens = found["confidences"], found["tokens"].tolist()
    ordered = confidences.sort().values
    for threshold in (*((ordered[1:] + ordered[:-1]) / 2).tolist(), float(ordered[-1]) + 1e-4):
        stops = next(place for place, sure in enumerate(confidences >= threshold) if not sure) + 1
        drafted = drafts(name, Strategy.FULL_LOOP, min_confidence=threshold)[0].tokens[0].tolist()
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


OF_EACH_KIND = ("dflash_mixed", "dflash2", "dspark", "eagle3", "mtp_qwen3_5_moe", "peagle")


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_greedy_text_matches_plain_decoding(name, plain):
    target = target_model(aux_hidden_state_layers(FOLDERS / name, TARGET_LAYERS))
    draft = load_draft(FOLDERS / name, target, dtype=torch.float32)
    assert texts(target, draft, 4) == plain


def test_aux_layers_do_not_depend_on_list_start(tmp_path):
    assert aux_hidden_state_layers(FOLDERS / "eagle3", TARGET_LAYERS) == (1, 3, 5)
    assert aux_hidden_state_layers(FOLDERS / "dflash", TARGET_LAYERS) == (1, 4)
    config = json.loads((FOLDERS / "eagle3" / "config.json").read_text())
    others = Generated({**config, "speculators_model_type": None}, load_file(FOLDERS / "eagle3" / "model.safetensors"))
    assert aux_hidden_state_layers(others.write(tmp_path), TARGET_LAYERS) == (2, 4, 6)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_target_with_other_aux_layers_is_rejected(name):
    target, layers = target_of(name), aux_hidden_state_layers(FOLDERS / name, TARGET_LAYERS)
    target.aux_hidden_state_layers = others = tuple(layer + 1 for layer in layers)
    problem = f"that enter layers {list(layers)}, this target returns those that enter {list(others)}"
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        load_draft(FOLDERS / name, target, dtype=torch.float32)


@pytest.mark.parametrize("name", ["dflash2", "dflash2_from_anchor", "dflash", "eagle3"])
def test_flat_config_loads_same_draft(tmp_path, name):
    """The decoder's fields beside speculators_model_type, without a section of their own."""
    config = json.loads((FOLDERS / name / "config.json").read_text())
    flat = {**config.pop("transformer_layer_config"), **config}
    tensors = load_file(FOLDERS / name / "model.safetensors")
    drafted = [
        load_draft(folder, target_of(name), dtype=torch.float32)
        for folder in (FOLDERS / name, Generated(flat, tensors).write(tmp_path))
    ]
    assert drafted[0].config == drafted[1].config
    assert drafted[0].trained_num_tokens == drafted[1].trained_num_tokens
