import json
import re
import sys
import threading
from contextlib import contextmanager
from importlib.metadata import EntryPoint

import pytest
import torch

from attn_backends import registry
from spec_decode import LLM, SamplingParams
from spec_decode.cli import output
from spec_decode.tools import plug_ins


def draft_words(pair, *words):
    return ["draft", "--device", "cpu", "--target", pair, "--max-tokens", "6", *words]


def test_draft_prints_text_plan_and_stats(pair, run):
    result = run(*draft_words(pair, "def ", "class "))
    assert result.exit_code == 0, result.output
    for part in ("strategy eager", "group draft", "accepted", "ms of host time per round"):
        assert part in result.stderr and part not in result.stdout
    assert "prompt 2:\n    class \n" in result.stdout and "prompt" not in result.stderr
    assert re.search(r"12 tokens in [\d.]+ s: \d+ tokens per second, the first after [\d.]+ s", result.stderr)


@pytest.mark.parametrize("k", [0, 4])
def test_draft_prints_json(pair, run, k):
    result = run(*draft_words(pair, "def ", "class ", "-k", k, "--json"))
    assert result.exit_code == 0 and not result.stderr, result.output
    found = json.loads(result.stdout)
    llm = LLM(pair, draft="draft", num_speculative_tokens=k, device="cpu")
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in range(2)]
    expected = llm.generate(["def ", "class "], params)
    assert found["completions"] == [
        {"prompt": one.prompt, "text": one.text, "token_ids": one.token_ids, "finish_reason": one.finish_reason}
        for one in expected
    ]
    stats = found["statistics"]
    assert (stats["new_tokens"], stats["num_speculative_tokens"]) == (12, k) and stats["rounds"] > 0
    assert (stats["strategy"], stats["device"]) == ("eager" if k else None, "cpu")


def test_draft_runs_small_pair_with_one_thread(pair, run, monkeypatch):
    before, counts = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    run(*draft_words(pair, "x", "-k", "0", "--max-tokens", "1"))
    assert len(counts) >= 4 and set(counts[::2]) == {1} and set(counts[1::2]) == {before}


def test_draft_reads_prompts_from_a_file(pair, tmp_path, run):
    (tmp_path / "prompts").write_bytes("\ufeffone\r\n\ntwo\u2028lines\n".encode())
    output = run(*draft_words(pair, "--prompts", "prompts")).output
    assert "prompt 1:\n    one\n" in output and "prompt 2:\n    two\\u2028lines\n" in output
    assert "prompt 3:" not in output


def test_draft_accepts_fp8_draft_weights(pair, run):
    words = draft_words(pair, "x", "--dtype", "bfloat16", "--draft-weights")
    result = run(*words, "fp8", "--explain")
    assert result.exit_code == 0 and "draft's matrix products read fp8 weights" in result.output, result.output
    assert " on cpu, bfloat16, draft weights in fp8\n" in result.output
    refused = run(*draft_words(pair, "x", "--draft-weights", "fp8"))
    assert refused.exit_code != 0 and "bfloat16 or float16, got float32" in refused.output
    assert "'int8' is not 'fp8'" in run(*words, "int8").output


ABOUT_DRAFTS = {
    "--draft-weights": "fp8",
    "--draft-backend": "torch_reference",
    "--strategy": "eager",
    "--tree": "4x12",
    "--verify": "block",
}


@pytest.mark.parametrize(("option", "value"), ABOUT_DRAFTS.items())
def test_draft_option_without_draft_is_rejected(option, value, pair, refused):
    message = refused(*draft_words(pair, "x", "-k", "0", option, value))
    assert f"{option} is {value!r}, but there is no draft. Pass --draft without -k 0, or omit {option}." in message


TREE = ("-k", "3", "--tree", "4x12")
PATHS = ("-k", "3", "--tree", "paths.json")
DRAFTS = {
    "a backend for each": ("latent_draft", (), " for the draft on cpu"),
    "a backend for the draft": (
        "latent_draft",
        ("--draft-backend", "torch_reference"),
        "backend triton_paged, torch_reference for the draft on cpu",
    ),
    "a backend for both": ("latent_draft", ("--backend", "torch_reference"), "backend torch_reference on cpu"),
    "a block": ("block_draft", (), "not piecewise: this draft proposes all its tokens in one step"),
    "a tree": ("draft", TREE, "of 3 draft tokens, in a tree of"),
    "a tree of paths": ("draft", PATHS, "of 3 draft tokens, in a tree of"),
    "a tree of a block": ("block_draft", (*TREE, "--strategy", "full_loop"), "strategy full_loop"),
    "paths of a block": ("block_draft", PATHS, "of 3 draft tokens, in a tree of"),
}


@pytest.mark.parametrize(("draft", "words", "label"), DRAFTS.values(), ids=DRAFTS)
def test_every_draft_matches_plain_decoding(draft, words, label, request, run, tmp_path):
    (tmp_path / "paths.json").write_text("[[0], [1], [0, 0], [0, 1]]")
    pair = request.getfixturevalue({"draft": "pair"}.get(draft, draft.replace("draft", "pair")))
    # Trees are verified by a rule that changes no text at any temperature.
    temperature = "0.7" if "--tree" in words else "0"
    plain, drafted = (
        run(*draft_words(pair, "def ", "--temperature", temperature, *more)).output
        for more in (("-k", "0"), ("--draft", draft, *words))
    )
    assert "plain decoding" in plain and label in drafted
    assert plain.partition("backend")[0] == drafted.partition("backend")[0]


def test_explain_shows_backends_of_target_and_draft(latent_pair, run):
    words = draft_words(latent_pair, "x", "--draft", "latent_draft", "--draft-backend", "torch_reference", "--explain")
    output = run(*words).output
    target, draft = output.split("target [")[1].split("draft [")
    assert "2/1 heads, dim 64, page 16, float32]: triton_paged\n" in target and "not torch_reference" in target
    assert "window 24, sinks, mla]: torch_reference\n" in draft and "not triton_paged: serves mha" in draft


@pytest.fixture
def slow_plug_in(monkeypatch):
    """Another package declares the backend `slow`."""
    says = b'{"loading": "slow"}\n{"finished": true}\n'
    child = [sys.executable, "-S", "-c", f"import os, sys; os.write(int(sys.argv[1]), {says!r})"]
    monkeypatch.setattr(plug_ins, "python_module", lambda module: child)
    point = EntryPoint("slow", "attn_backends.torch_reference:TorchReference", "attn_backends")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    monkeypatch.setattr(plug_ins, "_tried", {})


def test_explain_names_plug_in_before_loading_it(pair, run, slow_plug_in):
    """A plug-in that hangs is then the last one named."""
    words = draft_words(pair, "x", "--max-tokens", "1")
    assert "loading" not in run(*words).stderr
    assert "loading backend slow of package unknown\n" in run(*words, "--explain").stderr


@pytest.mark.parametrize("verb", ["list", "doctor", "draft x --max-tokens 1 --backend slow"])
def test_every_verb_names_plug_ins_it_loads(verb, run, slow_plug_in):
    result = run(*verb.split(), "--device", "cpu")
    assert result.exit_code == 0 and result.stderr.startswith("loading backend slow of package unknown\n")


def test_interpreter_run_prints_notice_and_progress(pair, run, monkeypatch):
    seen = []

    @contextmanager
    def repeat_line(text):
        seen.append(text())
        yield
        seen.append(text())

    words = draft_words(pair, "x", "--max-tokens", "3")
    assert "interpreter" not in run(*words).stderr
    monkeypatch.setattr("builders.kernels.triton_runtime.interpreting", lambda: True)
    monkeypatch.setattr("spec_decode.cli.draft.repeat_line", repeat_line)
    assert "TRITON_INTERPRET=1: kernels run in Triton's interpreter" in run(*words).stderr
    assert re.fullmatch(r"\d+ s: loading and capturing", seen[0]) and re.fullmatch(
        r"\d+ s: \d rounds, 3 tokens", seen[1]
    )


def test_repeat_line_prints_until_text_ends(capsys):
    shown, texts = threading.Event(), iter(["", "one", "two"])

    def text():
        if not (found := next(texts, "")):
            return found
        if found == "two":
            shown.set()
        return found

    with output.repeat_line(text, every=1e-4):
        shown.wait()
    assert capsys.readouterr().err == "one\ntwo\n"


def test_texts_follow_order_of_prompts(pair, run):
    together = run(*draft_words(pair, "a list is", "x", "def ")).output.partition("backend")[0]
    alone = [run(*draft_words(pair, prompt)).output.partition("backend")[0] for prompt in ("a list is", "x", "def ")]
    assert together == "".join(text.replace("prompt 1:", f"prompt {n}:") for n, text in enumerate(alone, 1))


def test_draft_repeats_for_same_seed(pair, run):
    words = draft_words(pair, "x", "--temperature", "1", "--seed")
    texts = [run(*words, seed).output.partition("backend")[0] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


REFUSED = {
    "pair": [
        ((), "no prompt"),
        (("",), "prompt 1 is empty"),
        (("x", "--chat"), "no chat template. Omit --chat to continue the prompt as plain text"),
        (("x", "--backend", "nonesuch"), "torch_reference"),
        (("x", "--backend", "rebuilt", "--strategy", "full_loop"), "for the test"),
        (("x", "--draft", "nonesuch"), "are draft, got 'nonesuch'"),
        (("x", "--draft-backend", "nonesuch"), "torch_reference"),
        (("x", "-k", "-1"), "-k is -1. Pass the draft tokens of a round, 1 or more, or 0 to decode without a draft."),
        (("x", "--strategy", "nosuch"), "one of auto, device_loop, full_loop, per_step, piecewise, eager."),
        (("x", "--strategy", "ful_loop"), "Did you mean full_loop?"),
        (("x", "-k", "999"), "num_speculative_tokens is 999: a round writes 999 draft tokens after a text"),
        (("x", "--temperature", "-1"), "temperature"),
        (("x", "--verify", "dice"), "one of rejection, block"),
        (("x", "--verify", "synthetic:9"), "from 0 to 4"),
        (("x", "--verify", "sampling"), "one of rejection, block"),
        (("x", "--tree", "4x16", "--verify", "block"), "a tree needs verification 'sampling', got 'block'"),
        (("x", "--tree", "4x64"), "1 to 63 draft tokens, got 64"),
        (("x", "--tree", "4x16", "-k", "1"), "num_tokens is 16, more than the 4 paths of 1 tokens with 4 choices"),
        (("x", "--tree", "nowhere"), "--tree is 'nowhere', which is neither WIDTHxTOKENS nor a readable file"),
        (("x", "--tree", "4x16", "--backend", "flash_attn3"), "flash_attn3"),
        *((("x", "--tree", f"no_tree_{at}.json"), "tree") for at in range(5)),
        (("x", "--max-tokens", "0"), "max_tokens"),
        (("x" * 600,), "that a round writes ahead. Shorten the prompt."),
        (("x" * 60, "--max-model-len", "64"), "or raise max_model_len to 67 or more"),
        (("x", "--target", "nowhere"), "model 'nowhere' is not a folder"),
        (("x", "--target", "n" * 300), "nnn is not a folder"),
        (("--prompts", "nowhere"), "utf-8 file"),
        (("--prompts", "bytes"), "utf-8 file"),
        (("\udcff",), "utf-8"),
        (("x", "--backend", "triton_paged", "--dtype", "float16", "--device", "mps"), "device"),
    ],
    "block_pair": [
        (
            ("x", "--draft", "block_draft", "--tree", "2x40"),
            "num_tokens is 40, more than the 30 paths of 4 tokens with 2 choices each",
        ),
        (
            ("x", "--draft", "block_draft", "--tree", "paths.json", "-k", "2"),
            "at most 2 deep, the draft's steps, got a path of 3",
        ),
    ],
}


@pytest.mark.parametrize(
    ("of", "words", "part"), [(of, *each) for of, refusals in REFUSED.items() for each in refusals]
)
def test_draft_rejects_invalid_arguments(of, words, part, request, refused, rebuilt, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "paths.json").write_text("[[0], [0, 0], [0, 0, 0]]")
    for at, text in enumerate(("{}", "[0]", "[[1]]", "[[", "[" * 100_000)):
        (tmp_path / f"no_tree_{at}.json").write_text(text)
    assert part in refused(*draft_words(request.getfixturevalue(of), *words))


def test_unsuitable_draft_backend_is_never_replaced(latent_pair, refused):
    words = draft_words(latent_pair, "x", "--draft", "latent_draft")
    of_both, of_draft = (refused(*words, option, "triton_paged") for option in ("--backend", "--draft-backend"))
    assert "not mla" in of_both and of_both.endswith("choose its backend with draft_backend.")
    assert "triton_paged: serves mha, not mla" in of_draft and "draft_backend" not in of_draft


@pytest.mark.parametrize(("prompts", "at_once"), [(1, 1), (9, 8)])
def test_draft_captures_only_batches_for_its_prompts(pair, run, monkeypatch, prompts, at_once):
    llms, make = [], LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda self, *a, **options: (llms.append(self), make(self, *a, **options))[1])
    run(*draft_words(pair, *["x"] * prompts, "--max-tokens", "1"))
    assert [llm.config.max_num_seqs for llm in llms] == [at_once]


def test_draft_of_another_model_needs_its_target(refused, tmp_path):
    message = refused("draft", "x", "--draft", tmp_path)
    assert f"--draft {tmp_path} needs --target" in message and "one of draft, block_draft, latent_draft" in message


def test_draft_rejects_pair_with_other_vocabulary(make_pair, tmp_path, refused):
    folder = make_pair(tmp_path / "small", vocab_size=128)
    assert "128 tokens, not the 256 of a byte-level pair" in refused(*draft_words(folder, "x"))
