"""An EAGLE-3 head of a model of transformers, trained the whole way on a target that is tiny."""

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
from spec_decode.models.eagle3 import Eagle3
from spec_decode.models.hf.folder import load_model
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


def test_the_head_is_what_a_published_one_is_and_has_no_embedding(folders):
    target, out = folders
    pair = load_published_pair(target, out, dtype=torch.float32, device=CPU)
    assert isinstance(pair.draft, Eagle3) and pair.draft.token_map is not None
    tensors = load_file(out / "model.safetensors")
    assert not any("embed" in name for name in tensors)
    assert {each.dtype for name, each in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert int(tensors["t2d"].sum()) == len(tensors["d2t"]) == 12


def test_a_text_with_the_head_is_what_the_target_writes_alone(folders):
    target, out = folders
    params = SamplingParams(max_tokens=9)
    llms = [LLM(target, draft=draft, device=CPU, max_num_seqs=1) for draft in (out, None)]
    drafted, plain = (llm.generate(["the cat"], params)[0].token_ids for llm in llms)
    assert drafted == plain


def test_what_was_done_is_written_beside_it(folders):
    record = json.loads((folders[1] / "training.json").read_text())
    assert record["accepted_of_4"].keys() == {"temperature 0", "temperature 1"}
    assert record["training_steps"] == 1 and record["tokens_a_step"] == 16 and "--texts 8" in record["command"]


def test_steps_of_training_bring_the_head_nearer_to_its_target(eagle3, folders):
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


def test_no_further_wave_is_written_after_the_deadline(eagle3, folders, monkeypatch, capsys):
    monkeypatch.setattr(eagle3, "WAVE", 2)
    sizes = [len(eagle3.write_texts(folders[0], 4, 6, 0, CPU, deadline)) for deadline in (0.0, float("inf"))]
    assert 0 < sizes[0] < sizes[1] and capsys.readouterr().out.count("2 texts: ") == 2


def test_too_little_text_for_a_window_is_refused(eagle3, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(eagle3, "write_in_parallel", lambda *asked: [1] * (eagle3.WINDOW + 1))
    with pytest.raises(SystemExit, match="Ask for more --texts"):
        eagle3.main(["--target", str(folders[0]), "--out", str(tmp_path), *TINY])
    assert not list(Path(tmp_path).iterdir())


def test_prompts_repeat_by_seed_and_share_no_topic_with_those_held_out():
    train, held_out = (str(make_prompts(4000, held_out=each)) for each in (False, True))
    assert make_prompts(9, held_out=True, seed=1) == make_prompts(9, held_out=True, seed=1)
    assert "black holes" in held_out and "black holes" not in train and "gravity" in train


def test_a_head_that_is_there_can_be_measured_again(eagle3, folders, capsys):
    target, out = folders
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    eagle3.main(["--target", str(target), "--out", str(out), *TINY, "--only-measure"])
    assert capsys.readouterr().out.strip() == str(json.loads(before["training.json"])["accepted_of_4"])
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
