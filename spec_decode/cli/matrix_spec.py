"""`attn-backends matrix --spec` and `--backend`: which backends serve an attention, and what was covered together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from spec_decode.cli.output import UserError, did_you_mean, say, stdout, write

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


def show_covered(backend: str, reports: Sequence[Report], device: str, targets: Mapping[str, str | None]) -> None:
    """Show what the passed checks of a backend covered: on the terminal, or into the target of `json`.

    Raises UserError for a backend without a report.
    """
    from spec_decode.matrix.covered import covered, to_json
    from spec_decode.matrix.terminal import covered_table

    found = covered(reports, backend, device=device)
    if not found.backends:
        known = sorted({report.backend for report in reports})
        where = f" on {device}" if device else ""
        raise UserError(f"no report is of {backend!r}{where}. Fix --backend or --device.{did_you_mean(backend, known)}")
    if (target := targets["json"]) is None:
        stdout().print(covered_table(found))
        return
    write(target, to_json(found).decode())
    if target != "-":
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
