"""`load_draft` on many checkpoints, except for the arithmetic."""

import pytest
import torch

from spec_decode.models import CheckpointError
from spec_decode.models.causal_lm import CausalDraft
from spec_decode.models.checkpoints.mask_token import read_mask_token
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.deepseek_v4 import StreamsFuse
from spec_decode.models.dflash import DFlash
from spec_decode.models.dflash2 import DFlash2
from spec_decode.models.dspark import DSpark
from spec_decode.models.layers.fuse import NormedPair, NormedProjection, Projection
from spec_decode.models.load import aux_hidden_state_layers, load_draft
from spec_decode.models.mtp_modules import MtpModules
from spec_decode.models.recurrent_draft import ParallelDraft, RecurrentDraft
from tests.spec_decode.models.generated import HIDDEN, VOCAB, StubTarget, make_causal, make_eagle3, make_latent_eagle3
from tests.spec_decode.models.test_published_drafts import EVERY

FUSED = {
    "eagle": Projection, "eagle3": NormedPair, "latent_eagle3": NormedPair, "deepseek_v3": NormedProjection,
    "deepseek_v4": StreamsFuse, "qwen": NormedProjection, "qwen_of_experts": NormedProjection,
    "mimo": NormedProjection, "glm": NormedProjection,
}  # fmt: skip
"""How each kind of RecurrentDraft fuses its inputs."""
KINDS = {
    **dict.fromkeys(FUSED, RecurrentDraft), "p_eagle": ParallelDraft, "llama": CausalDraft, "dflash": DFlash,
    "dflash2": DFlash2, "dspark": DSpark, "deepseek_v3_of_modules": MtpModules, "glm_of_modules": MtpModules,
}  # fmt: skip
OF_ANY_NAME = [
    *((kind, name) for kind in ("eagle", "eagle3") for name in ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle3")),
    ("latent_eagle3", "LlamaForCausalLMEagle3"),
    ("dflash2", "DFlashDraftModel"),
]
"""Drafts that their tensors tell, and what else they are called."""


def load(folder, kind, checkpoint=None, *, dtype=torch.float32, **target):
    case = EVERY[kind]
    target = StubTarget(**{**case.target, **target})
    return load_draft((checkpoint or case.checkpoint).write(folder), target, dtype=dtype), target


@pytest.mark.parametrize("kind", KINDS)
def test_draft_has_its_class_and_is_ready(tmp_path, kind):
    draft, target = load(tmp_path, kind)
    assert type(draft) is KINDS[kind]
    assert kind not in FUSED or type(draft.fuse) is FUSED[kind]
    assert not any(parameter.requires_grad for parameter in draft.parameters())
    assert not any(tensor.is_meta for tensor in (*draft.parameters(), *draft.buffers()))
    theirs = {parameter.data_ptr() for parameter in target.parameters()}
    assert theirs.isdisjoint(parameter.data_ptr() for parameter in draft.parameters()), "the target's are no part of it"


@pytest.mark.parametrize(("kind", "architecture"), OF_ANY_NAME)
def test_draft_is_recognised_by_tensors_not_name(tmp_path, kind, architecture):
    named = EVERY[kind].checkpoint.changed({"architectures": [architecture], "model_type": "eagle"})
    assert type(load(tmp_path, kind, named)[0]) is KINDS[kind]


def test_eagle_may_nest_its_layer_config(tmp_path):
    plain = EVERY["eagle"].checkpoint
    wrapped = plain.changed({"model": plain.config, "architectures": ["EAGLEModel"]}, without=["hidden_size"])
    assert load(tmp_path, "eagle", wrapped)[0].config == load(tmp_path, "eagle")[0].config


def test_draft_sizes_match_their_checkpoints(tmp_path):
    sizes = ("vocab_size", "hidden_size", "target_states_size", "position_offset", "max_positions")
    drafts = {kind: load(tmp_path / kind, kind)[0] for kind in ("eagle", "eagle3", "llama", "deepseek_v4")}
    assert {kind: tuple(getattr(draft, name) for name in sizes) for kind, draft in drafts.items()} == {
        "eagle": (VOCAB, HIDDEN, HIDDEN, 0, 96),
        "eagle3": (VOCAB, HIDDEN, 3 * HIDDEN, 0, 96),
        "llama": (VOCAB, HIDDEN, HIDDEN, 1, 80),
        "deepseek_v4": (24, 4 * HIDDEN, 4 * HIDDEN, 0, 96),
    }


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "llama", "dflash"])
def test_loaded_layers_are_in_eval_mode(tmp_path, kind):
    assert not load(tmp_path, kind)[0].training


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash", "deepseek_v4", "qwen"])
def test_target_embedding_is_shared(tmp_path, kind):
    draft, target = load(tmp_path, kind)
    assert draft.embedding is target.embed.weight


@pytest.mark.parametrize("stored", [False, True])
def test_tied_weights_are_one_tensor(tmp_path, stored):
    tied = EVERY["llama_tied_and_biased"].checkpoint
    head = {"lm_head.weight": tied.tensors["model.embed_tokens.weight"].clone()} if stored else {}
    draft, _ = load(tmp_path, "llama", tied.changed(tensors=head))
    assert draft.lm_head.weight.data_ptr() == draft.embed.weight.data_ptr()


def test_head_differing_from_tied_embedding_is_rejected(tmp_path):
    tied = EVERY["llama_tied_and_biased"].checkpoint
    head = {"lm_head.weight": tied.tensors["model.embed_tokens.weight"] + 1}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight in .* differs from embed_tokens\.weight"):
        load(tmp_path, "llama", tied.changed(tensors=head))


def test_layers_of_one_window_share_a_group(tmp_path):
    kinds = ["full_attention", "sliding_attention"] * 2
    checkpoint = make_causal(
        "Qwen3ForCausalLM", num_hidden_layers=4, layer_types=kinds, sliding_window=6, use_sliding_window=True
    )
    groups = load(tmp_path, "llama", checkpoint)[0].layer_groups(8)
    assert [(g.name, g.layers, g.spec.sliding_window, g.spec.page_size) for g in groups] == [
        ("layers", (0, 2), None, 8),
        ("window6", (1, 3), 6, 8),
    ]


LISTED = "eagle_aux_hidden_state_layer_ids"
STATES = [
    (make_eagle3(), 36, (2, 18, 33)),
    *(
        (make_eagle3(**{LISTED: listed}), count, states)
        for listed, count, states in (
            ([1, 46, 90], 94, (2, 47, 91)),
            ([1, 18, 35], 36, (2, 19, 36)),
            ([2, 18, 33], 36, (2, 18, 33)),
            ([24, 30, 36], 36, (24, 30, 36)),
            ([0, 1, 2], 36, (0, 1, 2)),
            ([3], 36, (3,)),
            ([1, 2], 36, (2, 3)),
            ([2, 11, 20, 33], 36, (2, 11, 20, 33)),
        )
    ),
    (make_eagle3(eagle_config={LISTED: [1, 15, 28]}), 36, (2, 16, 29)),
    (make_latent_eagle3(eagle_config={LISTED: [1, 29, 57]}), 61, (2, 30, 58)),
    (EVERY["dflash"].checkpoint.changed({"dflash_config.target_layer_ids": [1, 7]}), 8, (2, 8)),
    *((EVERY[kind].checkpoint, 36, None) for kind in ("eagle", "llama", "deepseek_v3")),
]


@pytest.mark.parametrize(("checkpoint", "count", "states"), STATES)
def test_aux_layers_are_named_by_layers_entered(tmp_path, checkpoint, count, states):
    """A list of EAGLE-3's that begins with 1 counts outputs, as DFlash's does, and any other the layers entered."""
    assert aux_hidden_state_layers(checkpoint.write(tmp_path), count) == states


@pytest.mark.parametrize(
    ("kind", "place", "most", "lists"),
    [
        ("eagle3", LISTED, 36, [[1, 2, 36], [2, 3, 37], [-1, 2, 3], [2, 3, "4"], [True, 2, 3]]),
        ("dflash", "dflash_config.target_layer_ids", 8, [[], [8], [-1], ["1"], [1.5], [True]]),
    ],
)
def test_layers_missing_from_target_are_rejected(tmp_path, kind, place, most, lists):
    for listed in lists:
        folder = EVERY[kind].checkpoint.changed({place: listed}).write(tmp_path)
        section, _, name = place.rpartition(".")
        with pytest.raises(CheckpointError, match=rf"^{name} in {section}.*list layers of the target, 0 to \d+, got"):
            aux_hidden_state_layers(folder, most)


@pytest.mark.parametrize(("kind", "listed", "message"), [
    ("eagle3", None, r"got \[2, 1, -1\], the default\."),
    ("dflash", [99, 0], r"must list layers of the target, 0 to 1, got \[99, 0\]"),
])  # fmt: skip
def test_layers_are_checked_against_target_size(tmp_path, kind, listed, message):
    case = EVERY[kind]
    folder = case.checkpoint.changed({"dflash_config.target_layer_ids": listed} if listed else {}).write(tmp_path)
    target = StubTarget(**case.target)
    load_draft(folder, target, dtype=torch.float32)
    target.num_layers = 2
    for read in (lambda: aux_hidden_state_layers(folder, 2), lambda: load_draft(folder, target, dtype=torch.float32)):
        with pytest.raises(CheckpointError, match=message):
            read()


@pytest.mark.parametrize("name", ["mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"])
def test_every_mask_token_name_is_read(name, tmp_path):
    def mask_of(**fields):
        return read_mask_token(TensorStore.open(make_causal(**fields).write(tmp_path)), VOCAB)

    assert mask_of(**{name: 5}) == 5 and mask_of(**{name: 5}, dflash_config={"mask_token_id": 6}) == 6


def test_top_level_dflash2_sizes_are_read(tmp_path):
    nested = EVERY["dflash2"].checkpoint
    own = {name: value for name, value in nested.config["dflash_config"].items() if "_id" in name}
    sizes = {name: value for name, value in nested.config["dflash_config"].items() if name not in own}
    assert load(tmp_path, "dflash2", nested.changed({"dflash_config": own, **sizes}))[0].num_candidates == 5


@pytest.mark.parametrize(
    ("kind", "size", "most"),
    [("dflash", 16, 15), ("dflash_from_the_anchor", 16, 16), ("dspark", 16, 16), ("dspark_after_the_anchor", 16, 15),
     ("dflash", 2, 1), ("dspark", 1, 1), ("dflash", None, None), ("dflash2", None, 7)],
)  # fmt: skip
def test_block_size_determines_trained_tokens(tmp_path, kind, size, most):
    """A DFlash2 has the size in its section."""
    draft = load(tmp_path, kind, EVERY[kind].checkpoint.changed({} if size is None else {"block_size": size}))[0]
    assert draft.trained_num_tokens == most


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "llama", "pard", "deepseek_v3", "deepseek_v3_of_modules"])
def test_only_blocks_and_modules_have_trained_tokens(tmp_path, kind):
    assert load(tmp_path, kind)[0].trained_num_tokens == (4 if kind == "deepseek_v3_of_modules" else None)
