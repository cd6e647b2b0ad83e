"""An EAGLE-3 head for a transformers model, trained end to end on a tiny target."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_pair.prompts import make_prompts

from spec_decode import LLM, SamplingParams, models
from spec_decode.llm.load import load_published_pair
from spec_decode.models.hf.folder import load_model
from spec_decode.models.recurrent_draft import RecurrentDraft
from tests.factories import CPU
from tests.spec_decode.llm.test_published import write_model, write_tokenizer

TINY = ["--texts", "8", "--tokens", "6", "--minutes", "0.0001", "--vocab", "12", "--batch", "2", "--prompts", "2"]


class Threads(ThreadPoolExecutor):
    """In the place of processes, each of which imports torch and transformers: what it is to do is pickled here too."""

    def __init__(self, count, context):
        super().__init__(count)

    def submit(self, *job):
        return super().submit(*pickle.loads(pickle.dumps(job)))


@pytest.fixture(scope="module")
def eagle3():
    """Not while tests are collected: a target of transformers takes seconds to import."""
    pytest.importorskip("transformers")
    from train_pair import eagle3

    return eagle3


@pytest.fixture(scope="module")
def folders(eagle3, tmp_path_factory):
    target, out = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    write_model(target, num_hidden_layers=6, vocab_size=16, eos_token_id=0, max_position_embeddings=512)
    write_tokenizer(target)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(eagle3, "WINDOW", 8)
        patched.setattr(eagle3, "ProcessPoolExecutor", Threads)
        eagle3.main(["--target", str(target), "--out", str(out), *TINY])
    return target, out


def test_head_is_a_published_eagle3_without_embedding(folders):
    target, out = folders
    pair = load_published_pair(target, out, dtype=torch.float32, device=CPU)
    assert isinstance(pair.draft, RecurrentDraft) and pair.draft.token_map is not None
    tensors = load_file(out / "model.safetensors")
    assert not any("embed" in name for name in tensors)
    assert {each.dtype for name, each in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert int(tensors["t2d"].sum()) == len(tensors["d2t"]) == 12


def test_text_with_head_matches_target_alone(folders):
    target, out = folders
    params = SamplingParams(max_tokens=9)
    llms = [LLM(target, draft=draft, device=CPU, max_num_seqs=1) for draft in (out, None)]
    drafted, plain = (llm.generate(["the cat"], params)[0].token_ids for llm in llms)
    assert drafted == plain


def test_training_record_is_written_beside_head(folders):
    record = json.loads((folders[1] / "training.json").read_text())
    assert record["accepted_of_4"].keys() == {"temperature 0", "temperature 1"}
    assert record["training_steps"] == 1 and record["tokens_a_step"] == 16 and "--texts 8" in record["command"]


@pytest.mark.outside_inference_mode
def test_training_steps_lower_the_loss(eagle3, folders):
    torch.manual_seed(0)
    target = models.TransformersTarget(
        load_model(folders[0], dtype=torch.float32, device=CPU), aux_hidden_state_layers=(0, 1)
    )
    with torch.no_grad():
        target.lm_head.weight.mul_(30)  # as it is, every token is about as likely as another
    vocab = torch.arange(0, 12)
    head, config = eagle3.make_head(target, vocab, CPU)
    tokens = torch.randint(0, 12, (4, 9))
    optimizer, losses = torch.optim.AdamW(head.parameters(), lr=1e-2), []
    for _ in range(30):
        loss, hits = eagle3.unrolled_loss(head, target, tokens, vocab)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0] and hits.shape == (eagle3.STEPS,)
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1]}


def test_no_texts_are_written_after_deadline(eagle3, folders, monkeypatch, capsys):
    monkeypatch.setattr(eagle3, "WAVE", 2)
    sizes = [len(eagle3.write_texts(folders[0], 4, 6, 0, CPU, deadline)) for deadline in (0.0, float("inf"))]
    assert 0 < sizes[0] < sizes[1] and capsys.readouterr().out.count("2 texts: ") == 2


def test_too_little_text_for_window_is_rejected(eagle3, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(eagle3, "write_in_parallel", lambda *args: [1] * (eagle3.WINDOW + 1))
    with pytest.raises(SystemExit, match="Increase --texts"):
        eagle3.main(["--target", str(folders[0]), "--out", str(tmp_path), *TINY])
    assert not list(Path(tmp_path).iterdir())


def write_target(folder, model_type, **fields):
    """Heads of 8 dims, which Qwen2's config does not say."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model(model_type, **{**sizes, **heads, "pad_token_id": None, **fields})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("granite", {"attention_multiplier": 0.5}),
        ("granite", {"attention_multiplier": 8**-0.5, "logits_scaling": 4.0}),
        (
            "gemma2",
            {
                "head_dim": 8,
                "query_pre_attn_scalar": 8,
                "attn_logit_softcapping": 30.0,
                "final_logit_softcapping": None,
            },
        ),
        ("mistral", {"sliding_window": 8}),
        ("llama", {"num_hidden_layers": 2}),
    ],
)
def test_untrainable_target_is_rejected_before_writing(eagle3, tmp_path, monkeypatch, model_type, fields):
    write_target(tmp_path, model_type, **fields)
    monkeypatch.setattr(eagle3, "write_in_parallel", lambda *args: pytest.fail("text was written"))
    with pytest.raises(SystemExit, match=f"the model in {tmp_path} has "):
        eagle3.main(["--target", str(tmp_path), "--out", str(tmp_path / "head"), *TINY])


def test_target_without_head_dim_gets_a_head(eagle3, tmp_path):
    write_target(tmp_path, "qwen2", num_hidden_layers=6)
    target = eagle3.load_target(tmp_path)
    assert eagle3.make_head(target, torch.arange(8), CPU)[1]["head_dim"] == 8


def test_target_with_several_ropes_gets_one(eagle3, tmp_path):
    write_target(tmp_path, "gemma3_text", num_hidden_layers=6, head_dim=8, query_pre_attn_scalar=8)
    assert eagle3.make_head(eagle3.load_target(tmp_path), torch.arange(8), CPU)[1]["rope_theta"] == 10000.0


def test_prompts_repeat_by_seed_and_split_topics():
    train, held_out = (str(make_prompts(4000, held_out=each)) for each in (False, True))
    assert make_prompts(9, held_out=True, seed=1) == make_prompts(9, held_out=True, seed=1)
    assert "black holes" in held_out and "black holes" not in train and "gravity" in train


def test_existing_head_can_be_measured_again(eagle3, folders, capsys):
    target, out = folders
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    eagle3.main(["--target", str(target), "--out", str(out), *TINY, "--only-measure"])
    assert capsys.readouterr().out.strip() == str(json.loads(before["training.json"])["accepted_of_4"])
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
