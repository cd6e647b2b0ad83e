import io
import math

import msgspec
import pytest
from rich.console import Console

from spec_decode.matrix import Claim, Word, build_matrix, cell_of, to_json, to_markdown, to_table
from spec_decode.report import Environment, Outcome, Report, Result


def env(**fields) -> Environment:
    given = {
        "device": "NVIDIA H200",
        "torch": "2.13.0",
        "triton": "3.7.1",
        "python": "3.11.7",
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-01-02T03:04:05+00:00",
        "driver": "580.1",
        "cuda": "13.0",
        "platform": "Linux",
    }
    return Environment(**{**given, **fields})


def result(outcome: str, **fields) -> Result:
    given = {"check": "graph.replay", "family": "graph", "case": "decode", "repro": "attn-backends check k"}
    return Result(**{**given, **fields}, outcome=Outcome(outcome))


def report(*results: Result, backend: str = "k", version: str = "1", **where) -> Report:
    return Report(backend=backend, version=version, env=env(**where), command="c", results=results)


def cell(*outcomes: str, claim: Claim | None = None):
    return cell_of([result(outcome) for outcome in outcomes], claim)


def drawn(matrix, width: int = 300) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(to_table(matrix))
    return stream.getvalue()


@pytest.mark.parametrize("bad", ["fail", "xpass", "error"])
def test_one_failure_breaks_a_cell(bad):
    assert cell("pass", "pass", bad).word is Word.BROKEN


def test_only_passes_verify_a_cell():
    assert cell("pass", "pass").word is Word.VERIFIED


def test_refused_cases_beside_passes_leave_a_cell_verified():
    assert cell("pass", "unsupported").word is Word.VERIFIED


@pytest.mark.parametrize("missing", ["xfail", "not_run", "unavailable"])
def test_passes_with_something_missing_are_partial(missing):
    assert cell("pass", missing).word is Word.PARTIAL


def test_known_failures_without_a_pass_are_broken():
    assert cell("xfail", "xfail").word is Word.BROKEN


def test_only_refusals_refuse_a_cell():
    assert cell("unsupported", "unsupported").word is Word.REFUSED


@pytest.mark.parametrize("outcomes", [(), ("not_run",), ("unavailable",), ("unavailable", "unsupported")])
def test_a_cell_where_nothing_ran_is_unknown_and_has_no_number(outcomes):
    found = cell(*outcomes)
    assert found.word is Word.UNKNOWN and found.text == "unknown"


def test_a_claim_without_a_run_is_claimed():
    assert cell(claim=Claim(claimed=True, words="IN_GRAPH")).text == "claimed (IN_GRAPH)"


def test_passes_without_a_claim_are_unclaimed():
    assert cell("pass", claim=Claim(claimed=False)).word is Word.UNCLAIMED


def test_a_claim_never_hides_a_failure():
    assert cell("fail", claim=Claim(claimed=True)).word is Word.BROKEN


def test_the_count_leaves_refused_cases_out():
    found = cell("pass", "pass", "xfail", "unsupported")
    assert (found.passed, found.total) == (2, 3)


def test_the_worst_error_is_the_largest():
    errors = [result("pass", evidence={"error_over_budget": value}) for value in (0.1, 0.4, 0.2)]
    assert cell_of(errors).text == "verified 3/3 0.4x"


@pytest.mark.parametrize("values", [(math.nan, 0.5), (0.5, math.nan)])
def test_a_nan_is_the_worst_error(values):
    worst = cell_of([result("fail", evidence={"error_over_budget": value}) for value in values]).worst
    assert worst is not None and math.isnan(worst)


def test_equal_reasons_become_one_note_with_a_count():
    notes = cell_of([result("unsupported", reason="no sinks", case=str(n)) for n in range(14)]).notes
    assert [(note.case, note.count) for note in notes] == [("0", 14)]


def test_the_columns_are_the_families_then_others_then_claims():
    claims = {"k": {"advance": Claim(claimed=True, words="IN_GRAPH")}}
    columns = build_matrix([report(result("pass", family="speed"))], claims).columns
    assert columns[:7] == ("contract", "builder", "numerics", "refusal", "poison", "graph", "drafter")
    assert columns[7:] == ("speed", "advance")


def test_runs_of_one_backend_and_device_stay_apart_newest_first():
    old = report(result("fail"), date="2026-01-01T00:00:00+00:00", torch="old")
    new = report(result("pass"), date="2026-02-01T00:00:00+00:00", torch="new")
    assert [row.env.torch for row in build_matrix([old, new]).rows] == ["new", "old"]


def test_runs_of_one_backend_stand_together():
    rows = build_matrix([report(backend=b, device=d) for b, d in (("b", "x"), ("a", "y"), ("b", "w"))]).rows
    assert [(row.backend, row.env.device) for row in rows] == [("a", "y"), ("b", "w"), ("b", "x")]


def test_the_terminal_table_is_ascii_with_words_and_reasons():
    text = drawn(build_matrix([report(result("pass"), result("xfail", reason="[red]#12[/red]"))]))
    assert "partial 1/2 ^1" in text and "^1 xfail: graph.replay[decode]: [red]#12[/red]" in text
    assert text.isascii()


def test_a_control_sequence_in_a_reason_never_reaches_the_terminal():
    text = drawn(build_matrix([report(result("fail", reason="\x1b[2Jgone"))]))
    assert "\x1b" not in text and "\\x1b[2Jgone" in text


def test_markdown_numbers_the_reasons_with_their_commands():
    text = to_markdown(build_matrix([report(result("fail", reason="slot 64 differs"))]))
    assert "broken 0/1 ^1" in text
    assert "1. fail: graph.replay\\[decode\\]: slot 64 differs<br>`attn-backends check k`" in text


def test_markdown_gives_one_number_to_one_note_in_two_rows():
    text = to_markdown(build_matrix([report(result("fail"), torch=version) for version in ("1", "2")]))
    assert text.count("broken 0/1 ^1") == 2 and "\n2. " not in text


def test_markdown_gives_every_row_its_provenance():
    text = to_markdown(build_matrix([report(result("pass"), dirty=True)]))
    provenance = text[text.index("## Provenance") :]
    expected = ("NVIDIA H200", "2.13.0", "3.7.1", "0123456789ab dirty", "2026-01-02T03:04:05+00:00", "580.1")
    assert all(value in provenance for value in expected)


def test_markdown_says_when_nobody_knows_whether_the_tree_was_dirty():
    assert "dirty or not: unknown" in to_markdown(build_matrix([report(result("pass"), dirty=None)]))


def test_hostile_text_stays_inside_its_markdown_cell():
    text = to_markdown(build_matrix([report(result("pass"), backend="a|b\n| c |<script>", device="*x* `y`")]))
    row = text.splitlines()[2]
    assert row.startswith("| 1 | a\\|b<br>\\| c \\|&lt;script&gt;@1 | \\*x\\* \\`y\\` |")
    assert "<script>" not in text


def test_a_command_with_backticks_stays_one_code_span():
    text = to_markdown(build_matrix([report(result("fail", repro="echo ``a`` `b`\n<br>"))]))
    assert "``` echo ``a`` `b` <br> ```" in text


def test_every_markdown_row_has_as_many_cells_as_the_header():
    claims = {"k": {"advance": Claim(claimed=False, words="a|b")}}
    lines = to_markdown(build_matrix([report(result("fail"))], claims)).splitlines()[:3]
    assert {line.replace("\\|", "").count("|") for line in lines} == {12}


def test_the_json_carries_a_nan_by_name():
    data = to_json(build_matrix([report(result("fail", evidence={"error_over_budget": math.nan}))]))
    document = msgspec.json.decode(data)
    assert document["schema"] == "attn-matrix/1"
    assert document["rows"][0]["cells"][document["columns"].index("graph")]["worst"] == "nan"


def test_no_reports_make_a_matrix_without_rows():
    matrix = build_matrix([])
    assert matrix.rows == () and "## Notes" not in to_markdown(matrix) and "backend" in drawn(matrix)
