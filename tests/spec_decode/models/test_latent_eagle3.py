"""EAGLE-3 over latent attention: who serves it, in every strategy, whole texts, and how its checkpoint can be wrong."""

import pytest
import torch

from attn_backends import Accepted, get
from builders import AttentionKind
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models import SHIPPED_PAIR, CheckpointError, load_pair
from spec_decode.models.load import aux_hidden_state_layers, load_draft
from tests.factories import CPU, engine_config, make_request
from tests.spec_decode.models import generated_mtp
from tests.spec_decode.models.generated import HIDDEN, Generated, StubTarget, make_latent_eagle3
from tests.spec_decode.models.generated_mtp import DraftFixture, assert_drafts_are_those_of_eager, close

FORMS = {
    "eagle3": make_latent_eagle3(vocab_size=generated_mtp.VOCAB, draft_vocab=15),
    "eagle3_1": make_latent_eagle3(vocab_size=generated_mtp.VOCAB, draft_vocab=None, fc_norm=True, norm_output=True),
}


def load(folder, checkpoint, **sizes):
    sizes = {"vocab_size": checkpoint.config["vocab_size"], "target_states_size": 3 * HIDDEN, **sizes}
    return load_draft(checkpoint.write(folder), StubTarget(**sizes), dtype=torch.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", [Strategy.PER_STEP, Strategy.FULL_LOOP, Strategy.DEVICE_LOOP])
@pytest.mark.parametrize("form", FORMS)
def test_every_strategy_drafts_what_eager_drafts_bit_for_bit(tmp_path, form, strategy, temperature):
    assert_drafts_are_those_of_eager(load(tmp_path, FORMS[form]), strategy, temperature)


def test_the_latent_kernels_take_the_layers_attention_and_agree_with_the_reference(tmp_path):
    model = load(tmp_path, FORMS["eagle3"])
    spec = model.layer_groups(16)[0].spec
    assert (spec.kind, spec.head_dim, spec.out_dim) == (AttentionKind.MLA, 48, 32)
    assert isinstance(get("triton_mla").supports(spec, CPU), Accepted)
    for (tokens, logits), (wanted, wanted_logits) in zip(
        DraftFixture(model, "triton_mla").drafts(None), DraftFixture(model).drafts(None), strict=True
    ):
        finite = wanted_logits.isfinite()
        assert tokens.tolist() == wanted.tolist() and logits.isfinite().equal(finite)
        close(logits[finite], wanted_logits[finite].double())


@pytest.mark.parametrize("steps", [1, 4])
def test_a_greedy_text_is_what_plain_decoding_says(tmp_path, steps):
    target = load_pair(SHIPPED_PAIR)[0]
    checkpoint = make_latent_eagle3(
        vocab_size=target.vocab_size,
        draft_vocab=100,
        own_embedding=True,
        target_hidden=target.hidden_size,
        num_states=1,
        eagle_aux_hidden_state_layer_ids=[2],
    )
    draft = load_draft(checkpoint.write(tmp_path), target, dtype=torch.float32)

    def texts(draft, steps):
        config = engine_config(num_speculative_tokens=steps, max_num_seqs=3, max_model_len=64, page_size=16)
        engine = Engine(target, draft, get("torch_reference"), config)
        prompts = ("The for statement", "def read(path):", "x")
        requests = [make_request(prompt=encode(prompt), max_tokens=20, seed=3) for prompt in prompts]
        return [generation.token_ids for generation in engine.generate(requests)]

    assert texts(draft, steps) == texts(None, 0)


def test_its_layers_are_read_as_those_of_every_eagle3(tmp_path):
    folder = make_latent_eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}).write(tmp_path)
    assert aux_hidden_state_layers(folder, 61) == (2, 30, 58)


def test_it_is_known_by_its_tensors_under_any_architecture(tmp_path):
    checkpoint = make_latent_eagle3(architectures=["LlamaForCausalLMEagle3"])
    assert type(load(tmp_path, checkpoint)).__name__ == "LatentEagle3"


WRONG = {
    "several layers": ({"num_hidden_layers": 2}, "^num_hidden_layers in .* must be 1, got 2"),
    "another activation": ({"hidden_act": "gelu"}, "^hidden_act in .* must be 'silu', got 'gelu'"),
    "a bias": ({"attention_bias": True}, "^attention_bias in .* must be False, got True"),
    "no rank": ({"kv_lora_rank": None}, "must say kv_lora_rank, an integer"),
    "another rank": ({"kv_lora_rank": 31}, r"kv_a_proj_with_mqa\.weight in .* must be \[47, 64\], got \[48, 64\]"),
    "another rotation": ({"rope_scaling": {"rope_type": "llama3"}}, "^rope_type in .* default or yarn, got 'llama3'"),
    "norms that are not there": ({"fc_norm": True}, r"must hold a tensor fc_norm\.0\.weight"),
    "a head that is not there": ({"draft_vocab_size": None}, r"^d2t in .* must be \[40\], got \[24\]"),
    "layers beyond": ({"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}, r"^eagle_aux_.*, 0 to 8, got \[2, 3, 9\]"),
    "more layers than are read": (
        {"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 5]},
        "reads target hidden states of size 128, this target returns 96",
    ),
    "another vocabulary": ({"vocab_size": 48}, "shares its target's vocab_size, .* has 48 and the target 40"),
    "another width": ({"target_hidden_size": 48}, "shares its target's hidden_size, .* has 48 and the target 32"),
}


@pytest.mark.parametrize(("changes", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_config_is_refused_by_its_name(tmp_path, changes, says):
    checkpoint = make_latent_eagle3()
    folder = Generated({**checkpoint.config, **changes}, checkpoint.tensors).write(tmp_path)
    target = StubTarget(target_states_size=3 * HIDDEN)
    target.num_layers = 8
    with pytest.raises(CheckpointError, match=says) as refused:
        load_draft(folder, target, dtype=torch.float32)
    assert str(tmp_path) in str(refused.value)


def test_a_draft_of_another_width_needs_an_embedding_of_its_own(tmp_path):
    checkpoint = make_latent_eagle3(target_hidden=48)
    with pytest.raises(CheckpointError, match=r"embedding of its own\), .* has 32 and the target 48"):
        load(tmp_path, checkpoint, hidden_size=48, target_states_size=144)
