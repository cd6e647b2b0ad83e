"""The answer to a question as text for a terminal, and as an HTML page that needs no script."""

from __future__ import annotations

from collections.abc import Iterator

from spec_decode.matrix.acceptance import Acceptance, Support
from spec_decode.matrix.answer import Answer, BackendAnswer, Near
from spec_decode.matrix.axes import SPEC
from spec_decode.matrix.cells import Run
from spec_decode.matrix.page import style, template
from spec_decode.matrix.text import age_text, counted, plain

_SHOWN = 6
"""Groups of checks that a terminal shows of a backend."""
_SHOWN_ON_A_PAGE = 20
"""The same of a page. The JSON has all."""
_SHOWN_FAILURES = 3
NOTHING = "no report of a backend matches. Run attn-backends check, or omit --device"


def to_lines(answer: Answer) -> Iterator[str]:
    """Yield the lines for a terminal: what was understood, the backends that accept, those that refuse."""
    where = f", on {answer.device}" if answer.device else ""
    yield f"Asked: {plain(answer.understood + where)}"
    yield f"Needs the columns: {', '.join(f'{column.label} ({column.tag})' for column in answer.needs)}"
    if not answer.backends:
        yield NOTHING
    refused = [each for each in answer.backends if each.acceptance.support is Support.REFUSED]
    for each in answer.backends:
        if each.acceptance.support is not Support.REFUSED:
            yield ""
            yield from _backend_lines(each, answer.runs)
    if refused:
        yield ""
        yield "Refused"
        yield from (
            f"  {plain(_title(each))}: {plain('; '.join(each.acceptance.reasons))} ({plain(each.acceptance.source)})"
            for each in refused
        )


def _backend_lines(found: BackendAnswer, runs: tuple[Run, ...]) -> Iterator[str]:
    yield plain(_title(found))
    yield f"  {plain(support_text(found.acceptance))}"
    yield f"  {evidence_text(found)}"
    for near in found.near[:_SHOWN]:
        yield f"  {plain(near_text(near, runs))}"
        yield f"      {plain(difference_text(near))}"
        yield f"      {'such as' if near.total > 1 else 'which is'} {plain(case_text(near))}"
        yield from (f"      failed: {plain(failure)}" for failure in near.failures[:_SHOWN_FAILURES])
    if len(found.near) > _SHOWN:
        yield f"  and {counted(len(found.near) - _SHOWN, 'other group')} of checks, in the JSON"


def _title(found: BackendAnswer) -> str:
    return f"{found.backend}@{found.version} on {found.device}"


def support_text(found: Acceptance) -> str:
    """Say whether the backend accepts what was asked, by what, and what that leaves open."""
    text = f"{found.support.value} by {found.source}"
    text += f": {'; '.join(found.reasons)}" if found.reasons else ""
    text += f", with {found.example}" if found.example else ""
    return text + (f", which does not say: {', '.join(found.unsaid)}" if found.unsaid else "")


def evidence_text(found: BackendAnswer) -> str:
    """Say whether there is exact evidence."""
    if found.exact:
        return "exact evidence:"
    return "no check has passed on exactly this; the nearest:" if found.near else "no check is comparable"


def near_text(near: Near, runs: tuple[Run, ...]) -> str:
    """Count the checks, with the families they are from, the device and the date."""
    env = runs[near.run].env
    age = f", {age_text(near.changed)}" if near.changed else ""
    return f"{near.passed} of {near.total} passed ({', '.join(near.families)}), {env.device}, {env.date[:10]}{age}"


def difference_text(near: Near) -> str:
    """Name the axes in which the checks differ from the question."""
    return (
        "differs in "
        + "; ".join(
            f"{each.axis}: {each.found}" + (f", asked {each.asked}" if each.axis != SPEC else "")
            for each in near.differences
        )
        if near.differences
        else "on exactly what was asked"
    )


def case_text(near: Near) -> str:
    """Name one of the checks, with its spec."""
    return f"{near.check}[{near.case}]" + (f": {near.spec}" if near.spec else "")


def to_html(answer: Answer) -> str:
    """Render the page. Everything from a report is escaped as text."""
    page: str = template("answer.html").render(
        answer=answer,
        accepted=[each for each in answer.backends if each.acceptance.support is not Support.REFUSED],
        refused=[each for each in answer.backends if each.acceptance.support is Support.REFUSED],
        nothing=NOTHING,
        shown=_SHOWN_ON_A_PAGE,
        counted=counted,
        style=style(),
        support_text=support_text,
        evidence_text=evidence_text,
        near_text=near_text,
        difference_text=difference_text,
        case_text=case_text,
    )
    return page
