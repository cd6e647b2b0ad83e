"""Models, tokenizers and texts from folders in their published form."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from builders import BatchError
from spec_decode.cli.main import main
from spec_decode.llm import LLM, SamplingParams
from spec_decode.llm.pair import Pair
from spec_decode.models import CheckpointError
from spec_decode.models.causal_lm import CausalDraft, load_target
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.load import load_draft
from tests.factories import CPU
from tests.spec_decode.models.test_speculators_drafts import FOLDERS

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
transformers.logging.set_verbosity_error()

from spec_decode.llm.load import load_published_pair  # noqa: E402

WORDS = ["<end>", "<turn>", "the", "cat", "sat"]
TEMPLATE = "{% for m in messages %}<turn> {{ m.content }}{% endfor %}{% if add_generation_prompt %} <turn>{% endif %}"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def write_model(folder: Path, *, max_shard_size: str = "1GB", **changes: Any) -> None:
    fields = {
        "vocab_size": 8,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 7,
    }
    config = transformers.LlamaConfig(**{**fields, **changes})
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=max_shard_size)


def write_tokenizer(
    folder: Path, words: list[str] = WORDS, template: str | None = TEMPLATE, *, tidies: bool = False
) -> None:
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="the")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", clean_up_tokenization_spaces=tidies
    )
    whole.chat_template = template
    whole.save_pretrained(folder)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """In bf16, two logits of a random model can be equal up to rounding."""
    torch.manual_seed(0)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A target with a tokenizer, and a small language model as its draft."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_model(target)
    write_tokenizer(target)
    write_model(draft)
    return target, draft


def test_decoded_text_is_not_cleaned_up(folders: tuple[Path, Path]) -> None:
    write_tokenizer(folders[0], [*WORDS[:-1], "."], tidies=True)
    end = len(WORDS) - 1
    assert load((folders[0], None)).decode([2, end]) == "the ."


def load(folders: tuple[Path, Path | None]) -> Pair:
    return load_published_pair(*folders, dtype=torch.float32, device=CPU)


def test_pair_loads_from_folders_with_target_tokenizer(folders: tuple[Path, Path]) -> None:
    write_tokenizer(folders[1])
    pair = load(folders)

    assert (pair.target.vocab_size, pair.draft.vocab_size, pair.draft.position_offset) == (8, 8, 1)
    assert pair.encode("the cat sat") == [2, 3, 4] and pair.decode([2, 3, 0]) == "the cat"
    with pytest.raises(CheckpointError, match=r"has no tokens. Pass some text"):
        pair.encode("")
    with pytest.raises(BatchError, match=r"the prompt 'the \\udcff' is not utf-8"):
        pair.encode("the \udcff")


def test_stop_ids_include_every_known_end_token(folders: tuple[Path, Path]) -> None:
    assert load(folders).stop_ids == {0, 7}
    transformers.GenerationConfig(eos_token_id=[-1, 7, 8]).save_pretrained(folders[0])
    assert load(folders).stop_ids == {0, 7}
    (folders[0] / "generation_config.json").unlink()
    assert load(folders).stop_ids == {0, 7}


def test_ignored_end_tokens_are_forbidden_before_min_tokens(folders: tuple[Path, Path]) -> None:
    params = SamplingParams(max_tokens=6, min_tokens=4, ignore_eos=True, logit_bias={0: 50.0, 7: 40.0})
    (completion,) = LLM(folders[0], device="cpu").generate("the c", params)
    assert not {0, 7} & {*completion.token_ids[:4]} and list(completion.token_ids[4:]) == [0, 0]


def test_token_without_embedding_is_rejected_on_use(folders: tuple[Path, Path]) -> None:
    """As Gemma-3-1b's token for images, which its tokenizer has and its model lacks."""
    write_tokenizer(folders[0], [*WORDS, "a", "b", "c", "<image>"], TEMPLATE + " <image>")
    llm, problem = (
        LLM(folders[0], device="cpu"),
        r"has the token '<image>', id 8, and the model has rows for the ids 0 to 7",
    )

    assert len(llm.generate("the c", SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
    with pytest.raises(BatchError, match=rf"^prompts\[0\]: the prompt {problem}"):
        llm.generate("the <image>")
    formatted = "the conversation, formatted by the model's chat template,"
    with pytest.raises(BatchError, match=rf"^prompts\[0\]: {formatted} {problem}"):
        llm.chat([{"role": "user", "content": "cat"}])
    for prompt, stop_ids in (([8], []), ("the", [8])):
        with pytest.raises(BatchError, match="0 to 7"):
            llm.generate(prompt, SamplingParams(max_tokens=2, stop_token_ids=stop_ids))


def test_end_token_without_embedding_is_left_out(folders: tuple[Path, Path]) -> None:
    write_tokenizer(folders[0], ["the", "cat", "sat", *"abcde", "<end>"])
    assert load(folders).stop_ids == {7}


def test_chat_follows_template_and_needs_one(folders: tuple[Path, Path]) -> None:
    llm, turns = LLM(folders[0], device="cpu"), [{"role": "user", "content": "cat"}]
    greedy = SamplingParams(max_tokens=4, ignore_eos=True)

    assert llm.chat([turns, turns], greedy)[1].token_ids == llm.generate([[1, 3, 1]], greedy)[0].token_ids
    assert llm.chat(turns, greedy)[0].num_prompt_tokens == 3
    write_tokenizer(folders[0], template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(CheckpointError, match="rejects this conversation: roles must alternate"):
        LLM(folders[0], device="cpu").chat(turns)
    (folders[0] / "chat_template.jinja").unlink()
    with pytest.raises(BatchError, match="has no chat template"):
        LLM(folders[0], device="cpu").chat(turns)


def test_target_without_draft_decodes_plainly(folders: tuple[Path, Path]) -> None:
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    plain, drafted = LLM(folders[0], device="cpu"), LLM(folders[0], draft=folders[1], device="cpu")

    assert plain.plan is None and "no draft" in plain.explain() and drafted.plan is not None
    assert plain.generate("the cat", greedy)[0].token_ids == drafted.generate("the cat", greedy)[0].token_ids


def quantise(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}))


REFUSED: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no tokenizer": (
        lambda target, draft: (target / "tokenizer_config.json").unlink(),
        r"has no tokenizer_config\.json",
    ),
    "other numbers for tokens": (
        lambda target, draft: write_tokenizer(draft, ["<end>", "<turn>", "cat", "the", "sat"]),
        r"2 of 5 tokens have other ids .*: 'the' is 2 in .* and 3 in ",
    ),
    "another vocabulary": (lambda target, draft: write_model(draft, vocab_size=9), "has vocab_size 9, the target 8"),
    "an end that is no token": (
        lambda target, draft: (target / "generation_config.json").write_text('{"eos_token_id": ["<end>"]}'),
        "eos_token_id has '<end>'",
    ),
    "a model that the library does not know": (
        lambda target, draft: (target / "config.json").write_text('{"model_type": "no_such_model"}'),
        "no_such_model",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), REFUSED.values(), ids=REFUSED)
def test_folders_that_form_no_pair_are_rejected(
    folders: tuple[Path, Path], spoil: Callable[[Path, Path], object], message: str
) -> None:
    spoil(*folders)
    with pytest.raises(CheckpointError, match=message):
        load(folders)


@pytest.mark.parametrize("sizes", [(8, 11), (11, 8)], ids=["a smaller draft", "a larger draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_tokenizers_allow_padded_vocabularies(
    folders: tuple[Path, Path], sizes: tuple[int, int], temperature: float
) -> None:
    for folder, size in zip(folders[::-1], sizes, strict=True):
        write_model(folder, vocab_size=size, eos_token_id=0)
    with pytest.raises(CheckpointError, match=r"nothing shows that both have the same tokens\. .*tokenizer's files"):
        load(folders)
    write_tokenizer(folders[1])

    llm = LLM(folders[0], draft=folders[1], device="cpu", num_speculative_tokens=2)
    params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True)
    (drafted,) = llm.generate([[2, 3]], params)
    assert len(drafted.token_ids) == 24 and max(drafted.token_ids) < sizes[1]
    alone = load_draft(folders[1], llm.pair.target, dtype=torch.float32, target_folder=folders[0])
    assert alone.vocab_size == sizes[1] and (alone.token_map is None) is (sizes[0] > sizes[1])
    if not temperature:
        plain = LLM(folders[0], device="cpu").generate([[2, 3]], params)
        assert plain[0].token_ids == drafted.token_ids


def test_tokenizers_may_differ_in_tokens_of_one_side(folders: tuple[Path, Path]) -> None:
    write_tokenizer(folders[1], [*WORDS, "<pad>"])
    assert load(folders).draft is not None
    write_tokenizer(folders[0], [*WORDS, "<image>"])
    with pytest.raises(CheckpointError, match=r"'<image>' is 5 in .* and no token in .*, where 5 is '<pad>'"):
        load(folders)


def test_missing_draft_folder_is_named_as_draft(folders: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"^draft 'nowhere' is not a folder.*pass the folder of the draft"):
        LLM(folders[0], draft="nowhere", device="cpu")


def test_quantised_draft_is_rejected_before_reading_target(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantise(folders[1])
    monkeypatch.setattr("spec_decode.models.hf.folder.load_model", None)

    with pytest.raises(CheckpointError, match=r"has method 'fp8'; a draft reads none. Use a bf16 copy"):
        load(folders)


SPOILT: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "no JSON": lambda path: path.write_bytes(b"{nope"),
    "no object": lambda path: path.write_bytes(b"[]"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}
MAY_MISS = ("generation_config.json", "tokenizer_config.json")


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("sharded", [False, True])
def test_only_the_broken_file_is_named(tmp_path: Path, sharded: bool, role: str) -> None:
    folders = tmp_path / "target", tmp_path / "draft"
    for folder in folders:
        write_model(folder, **({"max_shard_size": "3KB"} if sharded else {}))
        write_tokenizer(folder)
    spoilt, other = folders if role == "target" else folders[::-1]
    files = [path for path in sorted(spoilt.iterdir()) if path.suffix in (".json", ".safetensors")]
    assert (len(files) > 6) is sharded
    for path in files[-2:] if sharded else files:
        content = path.read_bytes()
        for name, spoil in SPOILT.items():
            if name == "missing" and path.name in MAY_MISS and (role, path.name) != ("target", MAY_MISS[1]):
                continue
            spoil(path)
            with pytest.raises(CheckpointError) as refused:
                load(folders)
            message = str(refused.value)
            assert path.name in message and str(spoilt) in message and str(other) not in message, (path.name, name)
            path.write_bytes(content)


BLAMED = {
    "a config of wrong types": ("config.json", {"hidden_size": "32"}, r"/config\.json: .*hidden_size"),
    "another size": (
        "config.json",
        {"hidden_size": 16},
        r"embed_tokens\.weight in .* must be \[8, 16\], got \[8, 32\]",
    ),
    "a layer of an unknown type": (
        "config.json",
        {"layer_types": ["full_attention", "mystery"]},
        r"/config\.json: layer 1 in layer_types is of an unknown type, 'mystery'\. Restore the file",
    ),
    "a wrong limit": ("generation_config.json", {"max_new_tokens": -1}, r"rejects .*/generation_config\.json: "),
    "a wrong token": ("tokenizer_config.json", {"eos_token": 5}, r"tokenizer_config\.json is wrong"),
    "another tokenizer": ("tokenizer.json", {"model": {"type": "none"}}, r"tokenizer\.json is wrong"),
}


@pytest.mark.parametrize(("file", "fields", "message"), BLAMED.values(), ids=BLAMED)
def test_wrong_value_names_its_file(
    folders: tuple[Path, Path], file: str, fields: dict[str, Any], message: str
) -> None:
    path = folders[0] / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(CheckpointError, match=message):
        load(folders)


def test_wrong_size_is_named_in_transformers_too(folders: tuple[Path, Path]) -> None:
    path = folders[0] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 16}))
    with pytest.raises(CheckpointError, match=r"other shapes than its config\.json says, lm_head"):
        load_published_pair(*folders, dtype=torch.float32, device=CPU, runs_in="transformers")


def test_target_returns_states_the_draft_reads(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(folders[0], num_hidden_layers=6)
    # Only which layers are asked for: the draft itself has its own tests.
    monkeypatch.setattr("spec_decode.llm.load.aux_hidden_state_layers", lambda folder, n: (2, n // 2, n - 3))

    assert load(folders).target.aux_hidden_state_layers == (2, 3, 3)


@pytest.mark.parametrize("sync", [torch.Tensor.item, torch.Tensor.nonzero, bool])
def test_uncapturable_model_error_names_layer(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, sync: Callable[[torch.Tensor], object]
) -> None:
    plain = transformers.models.llama.modeling_llama.LlamaMLP.forward

    def forward(self: Any, x: torch.Tensor) -> Any:
        sync(x.abs().max())
        return plain(self, x)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", forward)
    message = r"^layer model\.model\.layers\.0\.mlp \(LlamaMLP\) of the target cannot be captured.*=GraphMode\.NONE"
    with pytest.raises(CheckpointError, match=message):
        LLM(
            folders[0], draft=folders[1], num_speculative_tokens=2, strategy="full_loop", device="cpu",
            target="transformers",
        )  # fmt: skip


def test_explain_names_layers_the_draft_reads(tmp_path: Path) -> None:
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 6}
    write_model(tmp_path, **sizes)
    write_tokenizer(tmp_path)

    drafted = LLM(tmp_path, draft=FOLDERS / "eagle3", device="cpu").explain()
    assert "\ndraft reads the states that enter layers 1, 3, 5 of the target's 6\n" in drafted
    assert "reads the states" not in LLM(tmp_path, device="cpu").explain()


def test_tied_head_is_quantised_without_its_embedding(folders: tuple[Path, Path]) -> None:
    write_model(folders[1], tie_word_embeddings=True)
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    plain = LLM(folders[0], device="cpu", dtype="bfloat16")
    llm = LLM(folders[0], draft=folders[1], device="cpu", dtype="bfloat16", draft_weights="fp8")

    draft = llm.pair.draft
    assert isinstance(draft, CausalDraft) and isinstance(draft.lm_head.weight, Fp8Weight)
    assert torch.equal(draft.lm_head.weight.values, Fp8Weight.of(draft.embed.weight).values)
    assert llm.generate("the cat", greedy)[0].token_ids == plain.generate("the cat", greedy)[0].token_ids


def test_missing_transformers_names_package_to_install(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(CheckpointError, match=r"Run pip install '\.\[transformers\]' in a checkout"):
        load(folders)


def test_served_target_does_without_models_of_transformers(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "spec_decode.models.hf.target", None)
    assert load(folders).target_runs == "on this library's layers"
    with pytest.raises(ImportError):
        load_published_pair(*folders, dtype=torch.float32, device=CPU, runs_in="transformers")


def test_target_is_read_in_the_order_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which layer 10 precedes layer 2, and a layer's norms precede its products."""
    write_model(tmp_path, num_hidden_layers=12, max_shard_size="30KB")
    store, places = TensorStore.open(tmp_path), list[tuple[str, int]]()
    for name in ("stacked", "parameter"):
        read = getattr(ScopedWeights, name)

        def recorded(weights: ScopedWeights, names: Any, *sizes: Any, read: Any = read, **options: Any) -> Any:
            places.append(min(map(weights.place, [names] if isinstance(names, str) else names)))
            return read(weights, names, *sizes, **options)

        monkeypatch.setattr(ScopedWeights, name, recorded)
    target = load_target(store, dtype=torch.float32, device=CPU)
    assert places == sorted(places) and len(places) == len([*target.parameters()])
    assert len({file for file, _ in places}) > 2


def test_misfit_is_found_before_any_tensor_is_read(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps({**config, "intermediate_size": 17}))
    monkeypatch.setattr(TensorStore, "_copy", None)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight in .* must be \[17, 32\], got \[16, 32\]"):
        load((folders[0], None))


def test_large_target_shows_progress_on_terminal(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stderr: io.StringIO, **options: bool) -> str:
        monkeypatch.setattr(sys, "stderr", stderr)
        LLM(folders[0], device="cpu", **options)
        return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stderr.getvalue())

    assert not shown(Terminal())
    monkeypatch.setattr("spec_decode.llm.progress._LARGE", 1)
    size = (folders[0] / "model.safetensors").stat().st_size
    output = shown(Terminal())
    assert "loading" in output and f"{size / 1e3:.1f}/{size / 1e3:.1f} kB" in output and "/s" in output
    assert not shown(Terminal(), progress=False) and not shown(io.StringIO())


def test_the_command_line_drafts_with_published_folders(folders: tuple[Path, Path]) -> None:
    words = ["draft", "the cat", "--target", str(folders[0]), "--draft", str(folders[1]), "--device", "cpu"]
    result = CliRunner().invoke(main, [*words, "--max-tokens", "6", "-k", "2", "--top-k", "3", "--explain"])

    assert result.exit_code == 0, result.output
    for part in ("continued:", "strategy eager", "target [2/1 heads, dim 16", "of 2 draft tokens"):
        assert part in result.output
    few = float(re.search(r"accepted (\S+) of 2", result.output)[1]) < 0.5
    assert few is ("likely faster: -k 0" in result.output)


@pytest.mark.parametrize("more", [[], ["-k", "0"], ["-k", "0", "--draft", "/nowhere"]])
def test_the_command_line_decodes_a_target_alone(folders: tuple[Path, Path], more: list[str]) -> None:
    words = ["draft", "the cat", "--target", str(folders[0]), "--device", "cpu", "--max-tokens", "6", *more]
    result = CliRunner().invoke(main, words)

    assert result.exit_code == 0 and "plain decoding, without a draft" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chat"], "no chat template"),
        (["--draft", "/nowhere"], "/nowhere"),
        (["--target", "/nowhere", "--draft", "/nowhere"], "/nowhere"),
    ],
    ids=["chat without template", "no such draft", "no such folder"],
)
def test_command_line_rejects_arguments_without_pair(words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["draft", "x", "--device", "cpu", *words])

    assert result.exit_code == 2 and message in result.output
