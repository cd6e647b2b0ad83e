"""Format a conversation by the model's chat template, and explain why a template refuses it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from spec_decode.llm.prompts import Message, text_turns
from spec_decode.models import CheckpointError

_PLAIN = "format the conversation yourself and pass it to generate as text"


def encode_chat(tokenizer: Any, conversation: Sequence[Message]) -> list[int]:
    """Return the tokens of a conversation, and of what begins the answer.

    Raises BatchError for turns that are not text, and CheckpointError if the template does not format them.
    """
    turns = text_turns(conversation)
    try:
        ids: list[int] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template is a program by the model's author, and can raise anything
        raise CheckpointError(_explain(error, turns)) from error
    if not ids:
        raise CheckpointError(f"the model's chat template makes no text of this conversation. Instead, {_PLAIN}.")
    return ids


def _explain(error: Exception, turns: Sequence[dict[str, object]]) -> str:
    if isinstance(error, ImportError):
        return f"chat templates need the package jinja2, which cannot be imported: {error}. Run pip install jinja2."
    from jinja2.exceptions import TemplateError, TemplateSyntaxError, UndefinedError

    why, roles = _shortened(str(error)), ", ".join(str(turn["role"]) for turn in turns[:8])
    if isinstance(error, TemplateSyntaxError):
        return (
            f"the model's chat template is broken in line {error.lineno}: {why}. Restore chat_template.jinja or "
            f"tokenizer_config.json in its folder, or {_PLAIN}."
        )
    if isinstance(error, UndefinedError):
        missing = re.fullmatch(r"'dict object' has no attribute (.*)", why)
        what = f"{missing[1]} of a turn, which has none" if missing else f"something that is not there: {why}"
        return f"the model's chat template reads {what}. Add it to the turns ({roles}), or {_PLAIN}."
    if type(error) is TemplateError:  # raised by the template itself, in its author's words
        return (
            f"the model's chat template rejects this conversation: {why}. Its turns are {roles}. Change them as the "
            f"template requires, or {_PLAIN}."
        )
    return (
        f"the model's chat template fails on this conversation, whose turns are {roles}: {type(error).__name__}: "
        f"{why}. Check what the turns have besides their text, or {_PLAIN}."
    )


def _shortened(text: str) -> str:
    return " ".join(text.split()).rstrip(".")[:300]
