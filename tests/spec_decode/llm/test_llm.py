"""The front door: texts, streams, stop strings, and the answers to bad input."""

from __future__ import annotations

import copy
import importlib.metadata
import io
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_backends
import spec_decode
from attn_backends import AttentionBackend, registry
from builders import BatchError
from spec_decode import LLM, SamplingParams, TextChunk
from spec_decode.drafter import StrategyError
from spec_decode.models import SHIPPED_PAIR, CheckpointError
from spec_decode.trees import DynamicTreeConfig

pytestmark = pytest.mark.outside_inference_mode
PROMPTS = ["The for statement", "A list is"]
GREEDY = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("pydoc", draft="draft", device="cpu", max_num_seqs=2, max_model_len=128)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(SHIPPED_PAIR, device="cpu", max_num_seqs=2, max_model_len=128)


@pytest.fixture(scope="module")
def greedy(plain: LLM) -> list[str]:
    """What plain decoding says."""
    return [one.text for one in plain.generate(PROMPTS, GREEDY)]


def rest_of(chunks: Iterator[TextChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_drafting_changes_no_greedy_text(llm: LLM, greedy: list[str]) -> None:
    drafted = llm.generate(PROMPTS * 2, GREEDY)
    assert [one.text for one in drafted] == greedy * 2 and sum(drafted[0].accepted) > 0
    assert [one.prompt for one in drafted] == PROMPTS * 2
    assert {one.finish_reason for one in drafted} == {"length"} and len(drafted[0].token_ids) == 24


def test_no_module_runs_with_gradients() -> None:
    enabled = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: enabled.append(torch.is_grad_enabled())
    )
    try:
        llm = LLM("pydoc", draft="draft", device="cpu", max_num_seqs=2, max_model_len=128)
        llm.generate(PROMPTS, GREEDY)
    finally:
        hook.remove()
    assert enabled and not any(enabled)


@pytest.mark.parametrize(("steps", "rest"), [(None, "7"), (4, "4"), (9, "9: expect the target to reject those after")])
def test_block_draft_uses_block_size_by_default(steps: int | None, rest: str) -> None:
    llm = LLM("pydoc", draft="block_draft", device="cpu", num_speculative_tokens=steps)
    assert llm.config.num_speculative_tokens == (steps or 7)
    line = f"\ndraft was trained on blocks of block_size 8, 7 tokens a round; a round drafts {rest}"
    assert line in llm.explain() and ("expect" in llm.explain()) is (steps == 9)


@pytest.mark.parametrize("draft", ["draft", "block_draft"])
def test_tree_drafts_change_no_text(draft: str, plain: LLM) -> None:
    tree = DynamicTreeConfig(width=4, num_tokens=12)
    llm = LLM("pydoc", draft=draft, device="cpu", max_num_seqs=2, max_model_len=128, tree=tree, strategy="full_loop")
    params = [SamplingParams(max_tokens=16, temperature=temperature, seed=5) for temperature in (0.0, 0.8)]
    drafted, alone = llm.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert [one.text for one in drafted] == [one.text for one in alone]
    assert all(sum(one.accepted) > 0 for one in drafted)
    assert str(llm.plan).startswith("full_loop")


def test_explain_shows_how_drafter_runs(llm: LLM, plain: LLM) -> None:
    assert llm.plan is not None and plain.plan is None
    assert "target [" in llm.explain() and "strategy eager" in llm.explain() and "no draft" in plain.explain()
    assert all("\nno graphs: a CPU has no launches to save" in each.explain() for each in (llm, plain))


def test_graphs_are_emulated_on_cpu_only_if_requested(llm: LLM, plain: LLM) -> None:
    emulated = LLM("pydoc", draft="draft", device="cpu", max_num_seqs=1, max_model_len=128, strategy="full_loop")
    assert emulated.engine.target.graphs.reports and "no graphs" not in emulated.explain()
    assert not llm.engine.target.graphs.reports and not plain.engine.target.graphs.reports
    assert [one.text for one in emulated.generate(PROMPTS, GREEDY)] == [
        one.text for one in llm.generate(PROMPTS, GREEDY)
    ]


def test_explain_lists_missing_and_broken_backends(llm: LLM) -> None:
    unloadable = {"absent": ImportError("No module named 'kernels'"), "broken": OSError("no libcuda")}
    for name, error in unloadable.items():
        registry._registered[name] = registry._Registration(partial(_raise, error))
    try:
        lines = llm.explain().splitlines()
    finally:
        for name in unloadable:
            registry.unregister(name)
    (missing,) = [line for line in lines if "absent" in line]
    assert missing.startswith("not installed: ") and missing.endswith("attn-backends list says how to install each")
    assert len([line for line in lines if line.startswith("  not broken: ") and "no libcuda" in line]) == 2


def _raise(error: Exception) -> AttentionBackend:
    raise error


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=1.0, seed=7) for n in (4, 9)]
    found = llm.generate(PROMPTS, params)
    assert [len(one.token_ids) for one in found] == [4, 9]
    assert llm.generate(PROMPTS[1], params[1])[0].text == found[1].text


def test_each_prompt_gets_n_completions(llm: LLM) -> None:
    asked = [SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3), SamplingParams(max_tokens=6)]
    found = llm.generate(PROMPTS, asked)
    assert [len(one.completions) for one in found] == [3, 1] and found[0].completions[0] is found[0]
    alone = [llm.generate(PROMPTS[0], params)[0] for params in asked[0].each()]
    assert [one.text for one in found[0].completions] == [one.text for one in alone]
    assert len({one.text for one in alone}) == 3 and {one.prompt for one in found[0].completions} == {PROMPTS[0]}
    chunks = [*llm.stream(PROMPTS, asked)]
    for index, prompt in enumerate(found):
        for choice, one in enumerate(prompt.completions):
            assert rest_of(c for c in chunks if (c.index, c.choice) == (index, choice)) == one.text


def test_a_prompt_may_be_token_ids(llm: LLM, greedy: list[str]) -> None:
    ids, few = llm.pair.encode(PROMPTS[1]), SamplingParams(max_tokens=8)
    assert [llm.generate(prompt, few)[-1].text for prompt in (tuple(ids), [ids, ids])] == [greedy[1][:8]] * 2


def test_stream_yields_each_step_in_prompt_order(llm: LLM, greedy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step: Any = llm.engine.step
    steps: list[list[int]] = []
    pieces: list[TextChunk] = []

    def counted() -> bool:
        steps.append([])
        return bool(step())

    monkeypatch.setattr(llm.engine, "step", counted)
    for chunk in llm.stream(PROMPTS, GREEDY):
        pieces.append(chunk)
        steps[-1].append(chunk.index)
    for index, text in enumerate(greedy):
        own = [chunk for chunk in pieces if chunk.index == index]
        assert "".join(chunk.text for chunk in own) == text and len(own) > 2
        assert all(llm.pair.decode(chunk.token_ids) == chunk.text for chunk in own)
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + ["length"]
    assert all(each in ([], [0], [1], [0, 1]) for each in steps) and sum(map(bool, steps)) > 3


@pytest.mark.parametrize("stop", ["same", ["zzz", "same as"], "e", ["statement"], "x" * 10_000])
def test_stop_string_ends_text_before_it(llm: LLM, greedy: list[str], stop: Any) -> None:
    text, stops = greedy[0], [stop] if isinstance(stop, str) else stop
    cut = min((text.find(each) for each in stops if each in text), default=None)
    (found,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, stop=stop))
    assert found.text == text[:cut] and found.finish_reason == ("length" if cut is None else "stop")
    if cut is not None:
        assert llm.pair.decode(found.token_ids) in [text[:cut] + each for each in stops]
    chunks = [*llm.stream(PROMPTS[0], SamplingParams(max_tokens=24, stop=stop))]
    assert rest_of(iter(chunks)) == found.text
    assert [token for chunk in chunks for token in chunk.token_ids] == found.token_ids


def test_closed_stream_frees_its_requests(llm: LLM, greedy: list[str]) -> None:
    stream = llm.stream(PROMPTS * 2, SamplingParams(max_tokens=100))
    next(stream)
    stream.close()
    assert [one.text for one in llm.generate(PROMPTS, GREEDY)] == greedy
    assert llm.engine.pool.num_free == llm.engine.pool.num_pages


def test_interrupt_leaves_nothing_behind(llm: LLM, greedy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.engine.step, iter(range(9))

    def interrupted() -> bool:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert [one.text for one in llm.generate(PROMPTS, GREEDY)] == greedy


def test_two_streams_may_be_read_in_turn(llm: LLM, greedy: list[str]) -> None:
    first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS)
    begun = next(first)
    assert rest_of(second) == greedy[1] and begun.text + rest_of(first) == greedy[0]


def test_text_ending_during_another_stream_is_delivered(llm: LLM, greedy: list[str]) -> None:
    first, own = llm.stream(PROMPTS, GREEDY), []
    while not own or own[-1].index == 0:
        own.append(next(first))
    # The engine runs all to their ends here, while `first` is between its pieces of the second prompt.
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=30))
    own += first
    for index, text in enumerate(greedy):
        pieces = [chunk for chunk in own if chunk.index == index]
        assert "".join(chunk.text for chunk in pieces) == text and pieces[-1].finish_reason == "length"


def test_text_not_streamed_is_decoded_once(llm: LLM, greedy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, decode = [], llm.pair.decode

    def counted(token_ids: Sequence[int]) -> str:
        calls.append(token_ids)
        return decode(token_ids)

    monkeypatch.setattr(llm, "pair", replace(llm.pair, decode=counted))
    assert [one.text for one in llm.generate(PROMPTS, GREEDY)] == greedy
    # Each time with the few tokens before, and once more for what a text's end may have kept back.
    assert len(calls) <= 4 * len(PROMPTS)


@pytest.mark.parametrize("threads", [1, 2])
def test_small_model_steps_with_one_thread(plain: LLM, threads: int) -> None:
    before, seen, step = torch.get_num_threads(), [], plain.engine.step
    torch.set_num_threads(threads)
    try:
        plain.engine.step = lambda: (seen.append(torch.get_num_threads()), step())[1]  # type: ignore[method-assign]
        plain.generate(PROMPTS[0], SamplingParams(max_tokens=2))
        assert set(seen) == {1} and torch.get_num_threads() == threads
    finally:
        del plain.engine.step
        torch.set_num_threads(before)


def test_repr_shows_what_was_loaded(llm: LLM, plain: LLM) -> None:
    settings = "dtype='float32', device='cpu', max_model_len=128, max_num_seqs=2)"
    assert repr(llm) == f"LLM('pydoc', draft='draft', num_speculative_tokens=4, {settings}"
    assert repr(plain) == f"LLM({str(SHIPPED_PAIR)!r}, {settings}"


def test_zero_draft_tokens_load_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    found = LLM("pydoc", draft="draft", num_speculative_tokens=0, device="cpu", max_model_len=64)
    assert found.pair.draft is None and found.plan is None


def test_the_tokenizer_encodes_and_decodes(llm: LLM) -> None:
    assert llm.tokenizer.decode(llm.tokenizer.encode("naïve")) == "naïve"


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_llm_cannot_be_pickled_or_copied(llm: LLM, copied: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"^an LLM cannot be pickled or copied: .* Make one in each process"):
        copied(llm)


def test_out_of_memory_error_names_settings_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = r"1000000 prompts at once \(max_num_seqs\) of up to 100 tokens \(max_model_len\) take more memory"
    with pytest.raises(
        BatchError, match=rf"^{limits} than there is: group target .* GiB, but cpu has [\d.]+. Lower one"
    ):
        LLM("pydoc", device="cpu", max_num_seqs=10**6, max_model_len=100)

    def full(self: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nSee the documentation.")

    monkeypatch.setattr("spec_decode.engine.Engine.capture", full)
    with pytest.raises(BatchError, match=r"2 prompts at once .* out of memory. Tried to allocate 1 GiB. Lower one of"):
        LLM("pydoc", device="cpu", max_num_seqs=2, max_model_len=100)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_several_prompts_show_progress_on_terminal(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stderr: io.StringIO, prompts: Any, **options: bool) -> str:
        monkeypatch.setattr(sys, "stderr", stderr)
        llm.generate(prompts, GREEDY, **options)
        return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stderr.getvalue())

    output = shown(Terminal(), PROMPTS * 2)
    assert "4/4 prompts" in output and "96 tokens, " in output and " a second" in output
    assert not shown(Terminal(), PROMPTS * 2, progress=False)
    assert not shown(Terminal(), PROMPTS[0]) and not shown(io.StringIO(), PROMPTS)


BAD_PROMPTS = {
    "no prompt": [],
    "is empty": "",
    "prompts[1] is empty": ["x", ""],
    "prompts[0] is 3": [3.0],
    "prompts are 3": 3,
    "prompts are b'x'": b"x",
    "prompts[0] is None": [None],
    "prompts are None": None,
    "token ids, integers 0 to 255, got 256": [[256]],
    "is not utf-8": "\udcff",
    "no chat template": [{"role": "user", "content": "x"}],
}


@pytest.mark.parametrize(("message", "prompts"), BAD_PROMPTS.items())
def test_bad_prompt_is_rejected_before_running(llm: LLM, message: str, prompts: Any) -> None:
    for ask in (llm.generate, llm.stream):
        with pytest.raises(BatchError, match=message.replace("[", r"\[")):
            ask(prompts, GREEDY)
    assert not llm.engine.step()


def test_completion_has_requested_logprobs(llm: LLM) -> None:
    with_logprobs = LLM("pydoc", draft="draft", device="cpu", max_num_seqs=1, max_logprobs=2)
    (found,) = with_logprobs.generate(PROMPTS[0], SamplingParams(max_tokens=8, logprobs=2))
    assert [len(each) for each in found.logprobs] == [2] * 8, "a greedy token is among the most likely ones"
    assert [next(iter(each)) for each in found.logprobs] == found.token_ids
    with pytest.raises(BatchError, match=r"prompts\[0\] requests 2 logprobs, more than max_logprobs, 0"):
        llm.generate(PROMPTS[0], SamplingParams(logprobs=2))
    assert llm.generate(PROMPTS[0], GREEDY)[0].logprobs == []


def refusal(llm: LLM, prompt: int, max_tokens: int) -> str:
    """What a prompt of so many tokens gets, in a text of 128 where the model has room for 2,043."""
    with pytest.raises(BatchError) as caught:
        llm.generate([[1] * prompt], SamplingParams(max_tokens=max_tokens))
    return str(caught.value)


def test_long_prompt_error_gives_possible_remedies(llm: LLM) -> None:
    text = "prompts[0] has 100 tokens and max_tokens is 64: together more than 128, max_model_len. Shorten the prompt"
    room = 2048 - 1 - 4
    assert refusal(llm, 100, 64) == f"{text}, or lower max_tokens to 28 or less, or raise max_model_len to 164 or more."
    assert refusal(llm, 128, 64).endswith("Shorten the prompt, or raise max_model_len to 192 or more.")
    assert refusal(llm, 100, room - 99).endswith("Shorten the prompt, or lower max_tokens to 28 or less.")
    assert refusal(llm, room, 1).endswith("max_model_len. Shorten the prompt.")


def test_model_limit_error_suggests_no_higher_limit() -> None:
    llm = LLM(SHIPPED_PAIR, device="cpu", max_num_seqs=1)
    assert refusal(llm, 2000, 64).endswith(
        "together more than 2047, the model's 2048 positions minus 1 that a round writes ahead. "
        "Shorten the prompt, or lower max_tokens to 47 or less."
    )


@pytest.mark.parametrize("messages", [[], "hi", [[]], [["hi"]], None, [{"role": "user"}]])
def test_a_bad_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(BatchError, match=r"conversation|no prompt|prompts are|no chat template"):
        llm.chat(messages)


BAD_PARAMETERS = [
    *((bad, "sampling_params is .* for 2 prompts") for bad in (3, "x", {}, [GREEDY, None])),
    *(([GREEDY] * n, f"^sampling_params has {n} SamplingParams for 2 prompts. Pass one") for n in (0, 1, 3)),
    (
        SamplingParams(stop_token_ids=[97, 99_999]),
        r"^prompts\[0\] needs its stop_token_ids and end tokens from 0 to 255, the model's vocabulary, got",
    ),
]


@pytest.mark.parametrize(("params", "message"), BAD_PARAMETERS, ids=str)
def test_parameters_not_fitting_prompts_are_rejected(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        llm.generate(PROMPTS, params)


@pytest.mark.parametrize(
    "bad",
    [
        *({"max_tokens": value} for value in (0, -1, 1.0, True, None, "9")),
        *({"stop": value} for value in ("", [""], [3], 3, None, {"a": 1})),
        *({"stop_token_ids": value} for value in ([1.0], [True], 3, None)),
        *({"logprobs": value} for value in (0, -1, True, 1.0, "2")),
        {"ignore_eos": 1},
    ],
    ids=str,
)
def test_parameter_out_of_range_is_rejected(bad: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match=next(iter(bad))):
        SamplingParams(**bad)


BAD_MODELS: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "model 'nowhere' is not a folder": (CheckpointError, {"model": "nowhere"}),
    "model is 3. Pass the path of a folder, or a name": (CheckpointError, {"model": 3}),
    "draft is 3. Pass the path of a folder, or a name": (CheckpointError, {"draft": 3}),
    "drafts in .* are": (CheckpointError, {"draft": "nowhere"}),
    "or the draft's own target": (CheckpointError, {"draft": SHIPPED_PAIR}),
    "there is no draft": (BatchError, {"draft": None, "num_speculative_tokens": 2}),
    "speculative": (BatchError, {"num_speculative_tokens": -1}),
    "dtype is 'int8'": (BatchError, {"dtype": "int8"}),
    "device is 'tpu'": (BatchError, {"device": "tpu"}),
    "device is 'cpu:7'": (BatchError, {"device": "cpu:7"}),
    "device is 'cuda:99'": (BatchError, {"device": "cuda:99"}),
    "strategy is 'fast'. Pass one of device_loop": (BatchError, {"strategy": "fast"}),
    "piecewise, eager, or None for the default. Did you mean full_loop": (
        BatchError,
        {"strategy": "ful_loop"},
    ),
    "strategy is 'slow'": (BatchError, {"model": "not read", "strategy": "slow"}),
    "max_num_seqs is 0. Pass 1 or more": (BatchError, {"max_num_seqs": 0}),
    "positions": (BatchError, {"max_model_len": 10**6}),
    "unknown|nonesuch": (Exception, {"backend": "nonesuch"}),
    "^backend is .'triton_paged'.. Pass the name of one": (BatchError, {"backend": ["triton_paged"]}),
    "draft_backend is 3. Pass the name of one": (BatchError, {"draft_backend": 3}),
    "draft_backend is 'torch_reference' and there is no draft": (
        BatchError,
        {"draft": None, "draft_backend": "torch_reference"},
    ),
    "strategy is 'eager' and there is no draft": (BatchError, {"num_speculative_tokens": 0, "strategy": "eager"}),
    "tree is .* and there is no draft": (BatchError, {"draft": None, "tree": DynamicTreeConfig(width=2, num_tokens=4)}),
    "verification is 'block' and there is no draft": (BatchError, {"draft": None, "verification": "block"}),
    "cannot run|needs|piecewise": (StrategyError, {"strategy": "piecewise"}),
    "no setting 'max_len'. Did you mean max_model_len. Settings are model, draft,": (TypeError, {"max_len": 9}),
    "no setting 'tensor_parallel_size'. Settings are": (TypeError, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize(("message", "bad"), BAD_MODELS.items())
def test_invalid_model_or_setting_is_rejected(message: str, bad: tuple[type[Exception], Any]) -> None:
    kind, changes = bad
    with pytest.raises(kind, match=message):
        LLM(**{"model": "pydoc", "draft": "draft", "device": "cpu", **changes})


def test_a_pair_that_is_not_installed_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("spec_decode.llm.load", "spec_decode.models.pair"):
        monkeypatch.setattr(f"{module}.SHIPPED_PAIR", tmp_path / "pydoc")
    with pytest.raises(CheckpointError, match=r"pip install \./attn_backends_pairs in a checkout"):
        LLM("pydoc", device="cpu")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"^{tmp_path} has no config.json. Pass the folder of"):
        LLM(tmp_path, device="cpu")


def test_package_exports_exactly_what_it_lists() -> None:
    assert {name: getattr(spec_decode, name).__name__ for name in spec_decode.__all__} == {
        name: name for name in ("LLM", "BatchError", "CheckpointError", "Completion", "SamplingParams", "TextChunk")
    }
    assert spec_decode.BatchError is BatchError and spec_decode.CheckpointError is CheckpointError
    with pytest.raises(AttributeError, match="no attribute 'VLLM'"):
        spec_decode.VLLM  # noqa: B018


def test_the_version_is_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"attn-backends": "1.2.3"}[name])
    assert spec_decode.__version__ == attn_backends.__version__ == "1.2.3"

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert spec_decode.__version__ == "0+unknown"
    assert not hasattr(attn_backends, "version")


def test_folder_named_like_draft_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    assert LLM("pydoc", draft="draft", device="cpu", max_model_len=64).plan is not None
    with pytest.raises(
        CheckpointError, match=r"other is a folder. Pass one of .*block_draft.*, or the draft's own target"
    ):
        LLM("pydoc", draft="other", device="cpu")
