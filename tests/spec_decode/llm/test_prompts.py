"""A prompt has several forms, a turn has a role and text, and everything else is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders import BatchError
from spec_decode import LLM, SamplingParams
from spec_decode.llm.prompts import as_list, contents, text_turns
from spec_decode.models import CheckpointError
from tests.spec_decode.llm.tokenizer_kinds import ids, tokenizer_of, write_scripted

KIND = "byte level"
FEW = SamplingParams(max_tokens=2)
TURN = {"role": "user", "content": "fox"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    letters = {"f": "o", "o": "x", "x": "fox", "fox": "<|turn|>", "<|turn|>": "f"}
    write_scripted(folder, KIND, letters)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<|turn|>{{ m['content'] }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", max_num_seqs=2)


FORMS: dict[str, tuple[Any, list[list[str]]]] = {
    "one text": ({"prompt": "fox"}, [["fox"]]),
    "tokens": ({"prompt_token_ids": [3, 4]}, [["!", '"']]),
    "several": ([{"prompt_token_ids": [3]}, {"prompt": "fox"}], [["!"], ["fox"]]),
    "mixed": (["fox", {"prompt_token_ids": (3, 4)}, [4]], [["fox"], ["!", '"'], ['"']]),
    "both": ({"prompt_token_ids": [3], "prompt": "!", "multi_modal_data": None}, [["!"]]),
    "a conversation among others": ([[TURN], {"prompt": "fox"}], [["<|turn|>", "fox"], ["fox"]]),
}


@pytest.mark.parametrize(("prompts", "expected"), FORMS.values(), ids=FORMS)
def test_every_vllm_prompt_form_is_accepted(llm: LLM, prompts: Any, expected: list[list[str]]) -> None:
    tokens = [ids(KIND, *pieces) for pieces in expected]
    plain, found = llm.generate(tokens, FEW), llm.generate(prompts, FEW)
    assert [(one.text, one.num_prompt_tokens) for one in found] == [(one.text, one.num_prompt_tokens) for one in plain]
    streamed = [chunk.text for chunk in llm.stream(prompts, FEW) if chunk.index == len(found) - 1]
    assert "".join(streamed) == found[-1].text
    assert found[0].prompt == (prompts[0] if isinstance(prompts, list) else prompts)


REFUSED: dict[str, Any] = {
    r"prompts\[0\] is a dict with nothing, which is no prompt. Pass a text": {},
    r"prompts\[0\] is a dict with 'role', 'content', which is no prompt.*or a list of turns": TURN,
    r"prompts\[0\] has 'multi_modal_data'; LLM reads only prompt and": {"prompt": "x", "multi_modal_data": {}},
    r"prompts\[1\] is a dict with 'prompt_embeds'": ["fox", {"prompt_embeds": 3}],
    r"prompts\[0\] has the prompt \[3\]. Pass a text, or prompt_token_ids": {"prompt": [3]},
    r"prompts\[0\] has the prompt_token_ids 'fox'. Pass a list": [{"prompt_token_ids": "fox"}],
    r"prompts\[1\] is \[\]": [{"prompt": "x"}, {"prompt_token_ids": []}],
    r"prompts\[0\] is empty": {"prompt": ""},
    r"prompts\[0\] must hold token ids": {"prompt_token_ids": [3.5]},
    r"turn 2 of the conversation needs a role and content, got a dict with 'prompt'": [TURN, {"prompt": "x"}],
    r"turn 1 of the conversation needs .* got a dict with 'content'. Pass turns such as": [{"content": "x"}],
    r"turn 1 of the conversation needs .* got a dict with 'role'. Pass": [{"role": "user"}],
    r"turn 1 of the conversation needs a role": [{"role": 3, "content": "x"}],
    r"prompts\[1\]: turn 1 of the conversation needs .* got role 'user' and content None": [
        [TURN],
        [{"role": "user", "content": None}],
    ],
    r"turn 2 of the conversation is 'fox'. Pass a turn": [TURN, "fox"],
    r"turn 1 \(user\) has a part of type 'image_url'; the model reads only text": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    ],
    r"turn 1 \(user\) has a part of type None": [{"role": "user", "content": [{"text": "x"}]}],
    r"turn 1 \(user\) has a text part whose text is None": [{"role": "user", "content": [{"type": "text"}]}],
    r"turn 1 \(user\) has the content 3. Pass a text, or parts": [{"role": "user", "content": 3}],
    r"turn 1 \(user\) has the content '\\udcff', which is not utf-8": [{"role": "user", "content": "\udcff"}],
}


@pytest.mark.parametrize(("message", "prompts"), REFUSED.items())
def test_invalid_prompt_is_rejected_by_name(llm: LLM, message: str, prompts: Any) -> None:
    for ask in (llm.generate, llm.stream):
        with pytest.raises(BatchError, match=message):
            ask(prompts, FEW)


@pytest.mark.parametrize("prompts", [[{"prompt": "x"}], [{"prompt_token_ids": [3]}, {"prompt": "x"}], TURN])
def test_chat_accepts_only_conversations(llm: LLM, prompts: Any) -> None:
    with pytest.raises(BatchError, match=r"a conversation is \{.*\}. Pass a list of turns"):
        llm.chat(prompts)


def test_empty_chat_is_rejected(llm: LLM) -> None:
    with pytest.raises(BatchError, match=r"^a conversation is \[\]. Pass a list of turns"):
        llm.chat([])


@pytest.mark.parametrize("stop", ["\ud83d", ["x", "a\udcff"]])
def test_stop_string_that_is_not_utf8_is_rejected(stop: Any) -> None:
    with pytest.raises(BatchError, match="Pass a non-empty string that is utf-8"):
        SamplingParams(stop=stop)


def test_single_prompt_becomes_list_of_one() -> None:
    for one in ("x", [1, 2], {"prompt": "x"}, [TURN], [TURN, TURN]):
        assert as_list(one) == [one]
    for several in ([], ["x"], [[1]], [{"prompt": "x"}], [[TURN], "x"]):
        assert as_list(several) == several  # type: ignore[arg-type]
    assert contents("it", {"prompt_token_ids": [1], "prompt": "x"}) == [1]


def test_accepted_prompts_are_not_formatted(llm: LLM) -> None:
    def never(self: object) -> str:
        raise AssertionError("a long prompt takes long to format")

    texts, lists = (type("Long", (kind,), {"__repr__": never}) for kind in (str, list))
    for prompt in (lists([3, 4]), {"prompt_token_ids": lists([3, 4])}, {"prompt": texts("fox")}):
        assert contents("it", prompt) in ([3, 4], "fox") and as_list(lists([prompt])) == [prompt]
    turn = {"role": "user", "content": lists([{"type": "text", "text": texts("fox")}])}
    assert text_turns([turn]) == [{**turn, "content": "fox"}]
    assert llm.chat([lists([{"role": "user", "content": texts("fox")}])], FEW)[0].token_ids


def test_text_parts_of_a_turn_are_joined(llm: LLM) -> None:
    parts = [
        {"type": "text", "text": "f"},
        {"type": "input_text", "text": "o"},
        "x",
        {"type": "output_text", "text": ""},
    ]
    turn: dict[str, Any] = {"role": "user", "content": parts, "name": "a"}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
    assert text_turns([turn, calls]) == [{**turn, "content": "fox"}, {**calls, "content": ""}]
    assert turn["content"] is parts
    assert llm.pair.encode_chat is not None
    assert llm.pair.encode_chat([turn]) == llm.pair.encode_chat([TURN]) == ids(KIND, "<|turn|>", "fox")


TEMPLATES = {
    "rejects this conversation: roles must alternate. Its turns are user, tool. Change them": (
        "{{ raise_exception('roles must alternate.') }}"
    ),
    "reads 'mood' of a turn, which has none. Add it to the turns .user, tool.": "{{ messages[0].mood.upper() }}",
    "reads something that is not there: 'mood' is undefined": "{{ mood + 'x' }}",
    "is broken in line 2: .* Restore chat_template.jinja": "\n{% for %}",
    "fails on this conversation, whose turns are user, tool: ZeroDivisionError: .* zero. Check": "{{ 1 / 0 }}",
    "makes no text of this conversation": "{{ '' }}",
}


@pytest.mark.parametrize(("problem", "template"), TEMPLATES.items())
def test_failing_template_is_explained(llm: LLM, problem: str, template: str) -> None:
    from spec_decode.llm.chat_template import encode_chat

    tokenizer = tokenizer_of(KIND)
    tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match=f"the model's chat template {problem}"):
        encode_chat(tokenizer, [TURN, {"role": "tool", "content": "x"}])


def test_stop_string_may_be_an_added_token(llm: LLM) -> None:
    (found,) = llm.generate("f", SamplingParams(max_tokens=9, stop=["zzz", "<|turn|>"]))
    assert (found.text, found.finish_reason, found.token_ids) == ("oxfox", "stop", ids(KIND, "o", "x", "fox"))
    assert "".join(chunk.text for chunk in llm.stream("f", SamplingParams(max_tokens=9, stop="<|turn|>"))) == "oxfox"
    assert llm.generate("f", SamplingParams(max_tokens=5, stop="<tool>"))[0].finish_reason == "length"


def test_stop_string_around_special_token_is_rejected(llm: LLM) -> None:
    remedy = r"contains the special token '<\|turn\|>'.* Pass stop='<\|turn\|>', or stop_token_ids=\[2\]"
    with pytest.raises(BatchError, match=rf"prompts\[0\] has the stop string '<\|turn\|>\\n', which {remedy}"):
        llm.generate("f", SamplingParams(stop=["x", "<|turn|>\n"]))
    assert llm.generate("f", SamplingParams(max_tokens=2, stop=["<tool>\n"]))[0].finish_reason == "length"
