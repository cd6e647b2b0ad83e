"""The windows of a draft's layers, compared with what models of `transformers` request from their attention."""

import itertools
import json

import pytest
import torch

from spec_decode.models import CheckpointError
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.layer_windows import FULL, SLIDING, read_windows
from spec_decode.models.load import load_draft
from tests.spec_decode.models.generated import VOCAB, StubTarget, make_causal
from tests.spec_decode.models.test_published_drafts import EVERY

transformers = pytest.importorskip("transformers")

from spec_decode.models.hf.target import TransformersTarget  # noqa: E402

LAYERS = 2
SIZES = {
    "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "num_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}  # fmt: skip
ABSENT = object()
FIELDS = {
    "sliding_window": [ABSENT, None, 5],
    "use_sliding_window": [ABSENT, None, False, True],
    "max_window_layers": [ABSENT, None, 0, 1],
    "layer_types": [ABSENT, None, [FULL] * LAYERS, [SLIDING, FULL]],
    "attention_chunk_size": [ABSENT, 4],
}
COMBINATIONS = [
    {name: value for name, value in zip(FIELDS, values, strict=True) if value is not ABSENT}
    for values in itertools.product(*FIELDS.values())
]


def requested(family, fields, monkeypatch):
    """What each layer of the library's model requests; None if its config class or its masks reject the fields."""
    try:
        config = transformers.AutoConfig.for_model(family, **SIZES, **fields)
    except Exception:
        return None
    if family in ("qwen2", "qwen3") and SLIDING in config.layer_types and config.sliding_window is None:
        return None
    # It refuses models whose layer_types contradict what their layers do.
    monkeypatch.setattr(TransformersTarget, "_check_layers", lambda *_: None)
    target = TransformersTarget(transformers.AutoModelForCausalLM.from_config(config))
    return tuple(target._specs[layer].sliding_window for layer in range(LAYERS))


@pytest.mark.parametrize(
    "family",
    ["qwen2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "mistral", "qwen3", "qwen3_moe"))],
)
def test_windows_match_transformers_layers(family, monkeypatch):
    transformers.logging.set_verbosity_error()
    compared = set()
    for fields in COMBINATIONS:
        if (wanted := requested(family, fields, monkeypatch)) is None:
            continue
        found = read_windows(ConfigReader(fields, "config.json"), LAYERS, family=family)
        assert found == wanted, fields
        compared.add(wanted)
    one = {(None, None), (5, 5), (4096, 4096)}
    several = {(None, 5), (5, None), (None, 4096), (4096, None)}
    by_family = {"llama": {(None, None)}, "mistral": one, "qwen3_moe": one}
    assert compared == by_family.get(family, one | several)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_null_means_absent_where_transformers_rejects_it(family):
    for name in ("use_sliding_window", "max_window_layers"):
        for fields in COMBINATIONS:
            if fields.get(name, ABSENT) is not None:
                continue
            without = {key: value for key, value in fields.items() if key != name}
            assert outcome(fields, family) == outcome(without, family)


def outcome(fields, family):
    try:
        return read_windows(ConfigReader(fields, "config.json"), LAYERS, family=family)
    except CheckpointError:
        return "refused"


@pytest.mark.parametrize("fields", [{}, {"use_sliding_window": True, "sliding_window": None}])
def test_sliding_layers_without_a_window_are_refused(fields):
    config = ConfigReader({"layer_types": [SLIDING, FULL], **fields}, "config.json")
    with pytest.raises(CheckpointError, match="names sliding layers, but there is no window"):
        read_windows(config, LAYERS, family="qwen3")


def windows_of(draft):
    return [(group.layers, group.spec.sliding_window) for group in draft.layer_groups(4)]


@pytest.mark.parametrize(
    ("architecture", "windows"),
    [
        ("LlamaForCausalLM", [((0, 1), None)]),
        ("MistralForCausalLM", [((0, 1), 6)]),
        ("Qwen2ForCausalLM", [((0,), None), ((1,), 6)]),
        ("Qwen3ForCausalLM", [((0,), None), ((1,), 6)]),
    ],
)
def test_language_model_has_windows_of_its_class(tmp_path, architecture, windows):
    fields = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
    folder = make_causal(architecture, **fields).write(tmp_path)
    assert windows_of(load_draft(folder, StubTarget(vocab_size=VOCAB), dtype=torch.float32)) == windows


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"sliding_window": 6}, None),
        ({"sliding_window": 6, "layer_types": [SLIDING]}, 6),
        ({"sliding_window": 6, "model_type": "mistral"}, 6),
        ({"sliding_window": 6, "model_type": "qwen3", "max_window_layers": 0}, None),
        ({"sliding_window": 6, "model_type": "qwen3", "max_window_layers": 0, "use_sliding_window": True}, 6),
        ({"sliding_window": 6, "model_type": "eagle3"}, None),
        ({"sliding_window": 6, "attention_chunk_size": 4}, None),
    ],
)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_state_draft_has_listed_or_family_windows(tmp_path, kind, fields, window):
    case = EVERY[kind]
    folder = case.checkpoint.changed(fields).write(tmp_path)
    draft = load_draft(folder, StubTarget(**case.target), dtype=torch.float32)
    assert windows_of(draft) == [((0,), window)]


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 6}, [None, None]),
        ({"sliding_window": 6, "layer_types": [SLIDING, FULL]}, [6, None]),
        ({"sliding_window": 6, "use_sliding_window": True}, [None, None]),
        ({"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}, [None, 6]),
        ({"sliding_window": 6, "use_sliding_window": False, "max_window_layers": 1}, [None, None]),
    ],
)
def test_dflash_has_listed_or_qwen3_windows(tmp_path, fields, windows):
    case = EVERY["dflash"]
    folder = case.checkpoint.changed(fields).write(tmp_path)
    draft = load_draft(folder, StubTarget(**case.target), dtype=torch.float32)
    assert list(draft.config.windows) == windows


def test_dflash_sliding_layers_without_window_are_rejected(tmp_path):
    case = EVERY["dflash"]
    fields = {"sliding_window": 6, "layer_types": [SLIDING, FULL], "use_sliding_window": False}
    folder = case.checkpoint.changed(fields).write(tmp_path)
    with pytest.raises(CheckpointError, match="or use_sliding_window is false"):
        load_draft(folder, StubTarget(**case.target), dtype=torch.float32)


def test_window_in_mtp_layer_is_rejected(tmp_path):
    case = EVERY["mimo"]
    folder = case.checkpoint.write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for fields, refused in (
        ({"sliding_window": 6, "use_sliding_window": False, "max_window_layers": 0}, False),
        ({"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}, True),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        if refused:
            with pytest.raises(CheckpointError, match="a window in a layer of multi-token prediction"):
                load_draft(folder, StubTarget(**case.target), dtype=torch.float32)
        else:
            load_draft(folder, StubTarget(**case.target), dtype=torch.float32)
