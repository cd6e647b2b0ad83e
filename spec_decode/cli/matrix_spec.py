"""`attn-backends matrix --spec`: which backends serve an attention, by what evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from spec_decode.cli.output import UserError, say, stdout, write

if TYPE_CHECKING:
    from attn_backends import AttentionBackend
    from spec_decode.conformance.report import Report
    from spec_decode.matrix.answer import Answer


def answer_spec(words: str, reports: Sequence[Report], device: str, targets: Mapping[str, str | None]) -> None:
    """Answer a question from these reports: on the terminal, or into the targets of `html` and `json`.

    Raises UserError for words that make no question.
    """
    from spec_decode.matrix.answer import answer_question, to_json
    from spec_decode.matrix.answer_pages import to_html, to_lines
    from spec_decode.matrix.question import Question, QuestionError

    try:
        question = Question.of(words)
    except QuestionError as error:
        raise UserError(f"--spec: {error}") from error
    found = answer_question(question, reports, installed_backends(reports), device=device)
    if not any(targets.values()):
        click.echo("\n".join(to_lines(found)))
    writers: dict[str, Callable[[Answer], str]] = {"html": to_html, "json": lambda found: to_json(found).decode()}
    for form, render in writers.items():
        if (target := targets[form]) is not None:
            write(target, render(found))
            if "-" not in targets.values():
                say(stdout(), f"wrote {target}")


def installed_backends(reports: Sequence[Report]) -> dict[str, AttentionBackend]:
    """Return those of the reports' backends that load here, by name."""
    from attn_backends import BackendError, registry

    found = {}
    for name in {report.backend for report in reports if not report.engine}:
        try:
            found[name] = registry.get(name)
        except BackendError:
            continue
    return found
