"""The forms of a prompt: a text, token ids, a dict with either as in vLLM, or the turns of a conversation.

Prompts are long, so only a rejected one is formatted for a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import TypeIs

from builders import BatchError
from builders.errors import require

Message = Mapping[str, object]
"""A turn of a conversation: {"role": "user", "content": "Hello"}. Its content is a text, or a list of text parts."""
PromptDict = Mapping[str, object]
"""vLLM's form of a prompt: {"prompt": "Hello"} or {"prompt_token_ids": [1, 2]}."""
Prompt = str | Sequence[int] | PromptDict | Sequence[Message]

_FORMS = ("prompt", "prompt_token_ids")
_PASS_A_PROMPT = 'Pass a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'
_A_TURN = '{"role": "user", "content": "Hello"}'
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of a text part, as OpenAI's chat completions and its responses name them."""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[object]:
    """Return a list of prompts. One text, one dict, one list of token ids or one conversation is one prompt.

    Raises BatchError for anything else.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise BatchError(f"prompts are {prompts!r:.200}. {_PASS_A_PROMPT}, a conversation, or a list of these.")
    first = prompts[0] if prompts else ""
    is_one = isinstance(first, int) or (isinstance(first, Mapping) and not _is_prompt(first))
    return [prompts] if is_one else list(prompts)


def contents(name: str, prompt: object) -> str | Sequence[int] | Sequence[Message]:
    """Return the text, the token ids or the turns of one prompt. Raises BatchError for anything else."""
    if isinstance(prompt, Mapping):
        prompt = _of_dict(name, prompt)
    if isinstance(prompt, str):
        require(prompt != "", f"{name} is empty. Pass some text.")
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not prompt:
        raise BatchError(f"{name} is {prompt!r:.200}. {_PASS_A_PROMPT}, or a conversation.")
    return prompt


def is_conversation(prompt: object) -> TypeIs[Sequence[Message]]:
    """Return whether a prompt is a list of turns. They can still be wrong."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _is_prompt(prompt: PromptDict) -> bool:
    return any(prompt.get(form) is not None for form in _FORMS)


def _of_dict(name: str, prompt: PromptDict) -> object:
    """Return what a dict holds: its token ids if it has both forms, like vLLM."""
    given = [key for key, value in prompt.items() if value is not None]
    if not _is_prompt(prompt):
        raise BatchError(
            f"{name} is a dict with {_names(given)}, which is no prompt. {_PASS_A_PROMPT}, or a list of "
            f"turns such as {_A_TURN}."
        )
    if other := [key for key in given if key not in _FORMS]:
        raise BatchError(f"{name} has {_names(other)}; LLM reads only {' and '.join(_FORMS)}. Leave the others out.")
    token_ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if token_ids is None:
        if not isinstance(text, str):
            raise BatchError(f"{name} has the prompt {text!r:.200}. Pass a text, or prompt_token_ids.")
        return text
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise BatchError(
            f"{name} has the prompt_token_ids {token_ids!r:.200}. Pass a list of token ids, or the text as prompt."
        )
    return token_ids


def text_turns(conversation: Sequence[Message]) -> list[dict[str, object]]:
    """Return the turns with their content as one text each: the text parts of a list, joined without anything between.

    Raises BatchError for a turn without role or content, and for parts that are not text, such as images.
    """
    return [_text_turn(f"turn {number}", turn) for number, turn in enumerate(conversation, 1)]


def _text_turn(name: str, turn: object) -> dict[str, object]:
    if not isinstance(turn, Mapping):
        raise BatchError(f"{name} of the conversation is {turn!r:.200}. Pass a turn such as {_A_TURN}.")
    role, content = turn.get("role"), turn.get("content")
    if content is None and turn.get("tool_calls"):  # a turn that only calls tools says nothing
        content = ""
    if not isinstance(role, str) or not role or content is None:
        both = f"role {role!r:.50} and content {content!r:.50}"
        got = both if {"role", "content"} <= turn.keys() else f"a dict with {_names(turn)}"
        raise BatchError(
            f"{name} of the conversation needs a role and content, got {got}. Pass turns such as "
            f"{_A_TURN}, or prompts: texts, lists of token ids, or dicts with prompt or prompt_token_ids."
        )
    text = _joined(f"{name} ({role})", content)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BatchError(f"{name} ({role}) has the content {text!a:.200}, which is not utf-8. Re-encode it.") from error
    return {**turn, "content": text}


def _joined(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise BatchError(
            f"{name} has the content {content!r:.200}. Pass a text, or parts such as "
            '{"type": "text", "text": "Hello"}.'
        )
    return "".join(_part_text(name, part) for part in content)


def _part_text(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    require(
        kind in _TEXT_PARTS,
        f"{name} has a part of type {kind!r:.200}; the model reads only text. Leave the part out, or pass its text: "
        '{"type": "text", "text": "Hello"}.',
    )
    assert isinstance(part, Mapping)
    text = part.get("text")
    if not isinstance(text, str):
        raise BatchError(f"{name} has a text part whose text is {text!r:.200}. Pass a string.")
    return text


def _names(keys: object) -> str:
    names = [repr(key)[:50] for key in keys] if isinstance(keys, list | Mapping) else []
    return ", ".join(names[:5]) or "nothing"
