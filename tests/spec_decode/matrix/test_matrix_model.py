import math

import msgspec
import pytest

from spec_decode.conformance.coverage import EVERYTHING
from spec_decode.conformance.report import Claim
from spec_decode.matrix import Matrix, Status, build_matrix, to_json
from spec_decode.matrix.page import WIDTH, plot
from tests.spec_decode.matrix.evidence import TAG, agreement, limit, report, result, timing

OLD, NEW = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"


def statuses(matrix: Matrix) -> list[list[str]]:
    return [[cell.status.value for cell in row.cells.values()] for row in matrix.rows]


@pytest.mark.parametrize(
    ("tags", "columns"),
    [
        (
            "feature:sinks page:128 page:16 page:4 mode:decode graph:advance mode:prefill",
            "mode:prefill mode:decode graph:advance page:4 page:16 page:128 feature:sinks",
        ),
        (f"moon:full {TAG} odd", f"{TAG} moon:full odd"),
    ],
)
def test_columns_are_grouped_and_ordered(tags, columns):
    found = build_matrix([report(result("pass", *tags.split()))]).columns
    assert " ".join(column.tag for column in found) == columns
    assert all((column.label, column.group) == ("moon full", "moon") for column in found if column.tag == "moon:full")


def test_claim_creates_column_unless_filtered_by_tags():
    assert statuses(build_matrix([report(claims={"page:64": True})])) == [["claimed"]]
    matrix = build_matrix([report(result("pass", "page:4", "dim:64"), claims={"page:1": True})], tags=["page:*"])
    assert [column.tag for column in matrix.columns] == ["page:1", "page:4"]


def test_result_counts_in_every_tagged_column():
    assert statuses(build_matrix([report(result("fail", "page:4", "dim:64"), result("pass", "page:4"))])) == [
        ["broken", "broken"]
    ]
    untagged = msgspec.structs.replace(result("fail"), tags=())
    matrix = build_matrix([report(untagged, result("pass"))])
    assert [column.tag for column in matrix.columns] == [TAG, "family:numerics"]
    assert statuses(matrix) == [["verified", "broken"]]


def test_result_for_everything_fills_only_empty_cells():
    whole = result("unavailable", EVERYTHING, reason="no package")
    matrix = build_matrix([report(result("pass", "page:4"), result("pass", "dim:64"), backend="a"), report(whole)])
    assert statuses(matrix)[1] == ["unknown", "unknown"]
    assert matrix.rows[1].cells["page:4"].evidence[0].notes[0].reason == "no package"
    both = build_matrix([report(result("pass", "page:4"), whole, claims={"page:4": True, "dim:64": False})])
    assert statuses(both) == [["verified", "unknown"]]


def test_backend_claiming_nothing_on_device_has_no_claim():
    nothing = Claim(claimed=False, reason="runs on cuda, not on cpu")
    row = build_matrix(
        [report(result("unsupported", EVERYTHING), claims={EVERYTHING: nothing}), report(result("pass"), backend="a")]
    ).rows[1]
    assert row.cells[TAG].status is Status.REFUSED and row.cells[TAG].claim == nothing


def test_rows_are_ordered_with_last_checked_first():
    reports = [
        report(backend="b", device="x"),
        report(backend="a", device="z", cuda=None),
        report(backend="a", device="x", date=OLD),
        report(backend="a", device="x", version="0", date=NEW),
    ]
    rows = build_matrix(reports).rows
    assert [f"{row.device} {row.backend} {row.version}" for row in rows] == ["x a 0", "x a 1", "x b 1", "z a 1"]


def test_runs_of_one_version_share_a_row():
    reports = [report(result("fail"), date=OLD), report(result("pass"), result("pass"), date=NEW)]
    matrix = build_matrix(reports)
    (row,) = matrix.rows
    assert [matrix.runs[run].env.date for run in row.runs] == [NEW, OLD]
    assert row.cells[TAG].text == "verified 2/2; earlier broken 0/1" and row.cells[TAG].conflict


def checked(cases, outcome="pass", check="numerics.right", tag=TAG):
    return [result(outcome, tag, check=check, case=case) for case in cases.split()]


def test_soak_does_not_hide_checks_of_its_column():
    checks = report(*checked("a b c", check="drafter.agree", tag="strategy:full_loop"), date=OLD)
    soak = report(*checked("r10-s0", check="soak.long", tag="strategy:full_loop"), date=NEW)
    matrix = build_matrix([checks, soak])
    cell = matrix.rows[0].cells["strategy:full_loop"]
    assert cell.text == "verified 3/3 + 1/1" and not cell.earlier and not cell.conflict
    dates = [matrix.runs[found.run].env.date for found in cell.evidence]
    assert dates == [OLD, NEW]  # each number keeps its date
    failed = report(*checked("r10-s0", "fail", check="soak.long", tag="strategy:full_loop"), date=OLD)
    assert build_matrix([checks, failed]).rows[0].cells["strategy:full_loop"].text == "broken 3/3 + 0/1"


@pytest.mark.parametrize(
    ("older", "newer", "text", "conflict"),
    [
        # Repeated checks count once, with the newer result; the others keep theirs.
        (checked("a b c"), checked("b"), "verified 2/2 + 1/1", False),
        (checked("a b c"), checked("b", "fail"), "broken 2/2 + 0/1; earlier verified 1/1", True),
        (checked("a b") + checked("c", "fail"), checked("c"), "verified 2/2 + 1/1; earlier broken 0/1", True),
        (checked("a", "fail"), checked("b"), "broken 1/1 + 0/1", False),
        # What did not run replaces nothing.
        (checked("a b"), checked("a b", "not_run"), "partial 2/2", False),
        (checked("a b"), checked("a b", "unavailable"), "partial 2/2", False),
        (checked("a", "unavailable"), checked("a"), "verified 1/1", False),
        (checked("a", "unsupported"), checked("a"), "verified 1/1; earlier refused", True),
    ],
)
def test_the_newest_result_of_each_check_counts(older, newer, text, conflict):
    (row,) = build_matrix([report(*newer, date=NEW), report(*older, date=OLD)]).rows
    assert (row.cells[TAG].text, row.cells[TAG].conflict) == (text, conflict)


def test_newer_partial_run_leaves_other_columns():
    older = report(result("pass", "page:4"), result("pass", "dim:64"), date=OLD)
    newer = report(result("fail", "page:4"), date=NEW)
    matrix = build_matrix([older, newer])
    assert statuses(matrix) == [["broken", "verified"]]
    assert matrix.runs[matrix.rows[0].cells["dim:64"].evidence[0].run].env.date == OLD


@pytest.mark.parametrize(
    ("fields", "title", "repro"),
    [
        ({}, "k@1", "attn-backends matrix --run k --device cuda --tag mode:decode"),
        ({"cuda": None}, "k@1", "attn-backends matrix --run k --device cpu --tag mode:decode"),
        (
            {"backend": "Builder", "version": "1.2", "engine": "engine 1.2"},
            "engine 1.2: Builder",
            "attn-backends check --engine engine Builder",
        ),
    ],
)
def test_cell_has_command_that_repeats_its_check(fields, title, repro):
    (row,) = build_matrix([report(result("pass"), **fields)]).rows
    assert (row.title, row.cells[TAG].repro) == (title, repro)


def test_older_version_is_stale_after_newer_check():
    reports = [report(version="1", date=OLD), report(version="2", date=NEW), report(version="1", device="y", date=OLD)]
    stale = {(row.device, row.version): row.stale for row in build_matrix(reports).rows}
    assert stale == {
        ("NVIDIA H200", "1"): ("version 2 was checked on this device later, on 2026-02-01",),
        ("NVIDIA H200", "2"): (),
        ("y", "1"): (),
    }


def test_other_version_or_contract_is_stale():
    rows = build_matrix([report(version="1"), report(backend="other")], current={"k": "1.1"}).rows
    assert [row.stale for row in rows] == [("version 1.1 is installed now",), ()]
    assert "built for contract 0.9" in build_matrix([report(contract="0.9")]).rows[0].stale[0]


def test_json_has_nan_by_name_and_cell_status():
    data = to_json(build_matrix([report(result("fail", evidence={"error_over_budget": math.nan}))]))
    cell = msgspec.json.decode(data)["rows"][0]["cells"][TAG]
    assert (cell["status"], cell["evidence"][0]["worst"]) == ("broken", "nan")


def test_no_reports_make_a_matrix_without_rows():
    assert build_matrix([]).rows == () and build_matrix([]).columns == ()


def drafted(*timings, **fields):
    """The one row of an agreement, and its first cell."""
    (row,) = build_matrix([], [agreement(**fields)], timings).drafters
    return row.cells[0]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"unlike_eager": 1}, Status.BROKEN),
        *(({unlike: 1, "dtype": "float32"}, Status.BROKEN) for unlike in ("unlike_plain", "unlike_alone")),
        # Rounding excuses it, unless no bit may depend on the batch.
        *(({unlike: 1, "dtype": "bfloat16"}, Status.VERIFIED) for unlike in ("unlike_plain", "unlike_alone")),
        ({"unlike_plain": 1, "dtype": "bfloat16", "batch_invariant": True}, Status.BROKEN),
        ({"unlike_alone": 1, "dtype": "bfloat16", "batch_invariant": True}, Status.BROKEN),
        ({"refusal": "needs a graph", "accepted": None}, Status.REFUSED),
    ],
)
def test_draft_is_broken_if_its_text_differs(fields, status):
    cell = drafted(**fields)
    assert cell.status is status and cell.refusal == fields.get("refusal", "")


@pytest.mark.parametrize("other", [{"backend": "x"}, {"strategy": "eager"}, {"case": "round/steps"}, {"host_us": None}])
def test_host_time_comes_from_whole_rounds_only(other):
    host = [1.0, 2.0, 3.0]
    whole = {"case": "round", "strategy": "full_loop", "num_speculative_tokens": 4, "host_us": host}
    assert [time.us.p50 for time in drafted(timing(**whole), timing(**{**whole, **other})).host] == [2.0]


def test_prompts_are_summed_over_graph_modes():
    one = agreement(unlike_eager=1)
    more = [{"graph_modes": ["piecewise", "none"], "unlike_eager": 2}, {"num_speculative_tokens": 5, "accepted": 4.0}]
    rows = one.rows + tuple(agreement(**fields).rows[0] for fields in more)
    (row,) = build_matrix([], [msgspec.structs.replace(one, rows=rows)]).drafters
    (cell,) = row.cells
    assert [(p.num_speculative_tokens, p.prompts, p.unlike_eager, p.graph_modes) for p in cell.parity] == [
        (4, 18, 5, ("full", "piecewise", "none")),
        (5, 6, 0, ("full",)),
    ]
    assert [p.accepted for p in cell.longest] == [4.0]
    assert len(build_matrix([], [agreement(), one]).drafters) == 2  # runs of pairs stay apart


def sections_of(*rows):
    return build_matrix([], (), rows).speed


def bars_of(*rows):
    """The bars of the one panel there is."""
    ((panel,),) = [section.panels for section in sections_of(*rows)]
    return panel.bars


def test_panel_contains_timings_of_one_shape():
    peer = timing(backend="p", peer=True)
    sections = sections_of(timing(), peer, timing(num_reqs=32), timing(spec="16/1 heads, mla"))
    assert [[len(panel.bars) for panel in section.panels] for section in sections] == [[2, 1], [1]]
    assert [(bar.label, bar.peer) for bar in sections[0].panels[0].bars] == [("k", False), ("p", True)]


def test_sampling_distribution_is_part_of_shape():
    flat, peaked = (
        {"case": "sampling/top-k", "context": None, "spec": f"{kind} logits"} for kind in ("flat", "peaked")
    )
    (section,) = sections_of(timing(**flat), timing(**flat, backend="p", peer=True), timing(**peaked))
    assert [(panel.title, [(bar.label, bar.spec) for bar in panel.bars]) for panel in section.panels] == [
        ("1 request, flat logits", [("k", ""), ("p", "")]),
        ("1 request, peaked logits", [("k", "")]),
    ]


WHOLE = {"case": "round", "strategy": "full_loop"}


@pytest.mark.parametrize(
    ("fields", "bar"),
    [
        ({"limits": [limit("kernels_per_step", 1, True), limit("gpu_us", 3, True)]}, (3.0, True)),
        ({"limits": [limit("peer_ratio", 1.15, False)], "num_reqs": 2}, (None, False)),
        ({"limits": [limit("gpu_us", 20, True), limit("loop_us", 4, None)]}, (20.0, None)),
        # A limit on something else that is drawn decides nothing.
        ({**WHOLE, "limits": [limit("host_us", 80, False), limit("gpu_us", 20, True)]}, (20.0, True)),
    ],
)
def test_limit_is_drawn_only_on_its_quantity(fields, bar):
    (found,) = bars_of(timing(**fields))
    assert (found.limit, found.met) == bar
    assert "host_us" not in str([each.text for each in found.limits])


def test_host_limit_gives_no_gpu_result():
    sections = sections_of(timing(**WHOLE, host_us=[90.0, 90.0, 90.0], limits=[limit("host_us", 80, False)]))
    met = [(section.quantity[:3], section.panels[0].bars[0].met) for section in sections]
    assert met == [("GPU", None), ("hos", False)]


def test_outlier_bar_does_not_set_the_scale():
    rows = [timing(), timing(backend="b"), timing(backend="c", gpu_us=[900.0, 900.0, 900.0])]
    (panel,) = sections_of(*rows)[0].panels
    marks = plot(panel, "GPU time").marks
    assert [mark.beyond for mark in marks] == [False, False, True]
    assert marks[0].width == round(WIDTH * 10 / 12, 1) and marks[2].width == WIDTH


def dated(date):
    return timing(env={**msgspec.to_builtins(timing().env), "date": date})


def engine(**fields):
    """A row of a whole engine, whose rounds take 30 us."""
    us = [30.0, 30.0, 60.0]
    row = {"case": "throughput/speculation", "gpu_us": None, "wall_us": us, "per_user": 1.0, "floor_us": None}
    return timing(**{**row, "num_speculative_tokens": 0, "strategy": "full_loop", **fields})


def engines(case, *ways):
    """Rows of engines that draft alike but for these fields."""
    return [engine(case=case, num_speculative_tokens=2, accepted=1.0, **way) for way in ways]


ONCE, ELSEWHERE = timing(), timing(command="attn-backends bench again")
FAST = {"b": [3, 9, 9], "c": [1, 4, 5], "d": [7, 7, 7]}
LABELS = {
    "by their specs": ([timing(**WHOLE, spec=f"32/8 heads{kv}") for kv in ("", ", kv fp8")], "k; k kv fp8"),
    "by their age": ([dated(OLD), dated(NEW)], "k; k (older)"),
    "from fast to slow, what launches nothing first": (
        [
            *(timing(backend=name, gpu_us=us) for name, us in FAST.items()),
            timing(backend="a", gpu_us=None, kernels_per_step=0, floor_us=None),
        ],
        "a; c; d; b",
    ),
    "by their temperature": (
        [timing(**WHOLE, temperature=each) for each in (0.0, 1.0)],
        "k temperature 0; k temperature 1",
    ),
    "of one temperature": ([timing(**WHOLE, temperature=0.0)], "k"),
    "by their run": ([ONCE, ELSEWHERE], "k (run 1); k (run 2)"),
    "by their place in a run": ([ONCE, ONCE, ELSEWHERE], "k (run 1, 1 of 2); k (run 1, 2 of 2); k (run 2)"),
    "a peer, which has its word and colour": ([ONCE, timing(peer=True)], "k; k"),
    "by step 0 in a graph or not": (
        engines(
            "throughput/extend-graph",
            *({"extend_in_graph": graph, "host_waits": waits} for graph in (False, True) for waits in (False, True)),
        ),
        "launched; launched, host waits; in a graph; in a graph, host waits",
    ),
    "by their graphs a round": (
        engines("throughput/one-graph", {"one_graph": False}, {"one_graph": True}),
        "two graphs; one graph",
    ),
    "by the kind of draft": (
        engines("throughput/block-drafts", {"draft": "EAGLE-3"}, {"draft": "DFlash"}),
        "EAGLE-3; DFlash",
    ),
    **{
        case: (
            engines(case, *({"tree": tree != "D", "draft": tree} for tree in ("D", "D, 4x7", "D, 8x16"))),
            "D a chain; D, 4x7 a tree; D, 8x16 a tree",
        )
        for case in ("block-trees", "block-tree-rounds")
    },
}


@pytest.mark.parametrize(("rows", "labels"), LABELS.values(), ids=LABELS)
def test_bars_of_a_panel_have_unique_labels(rows, labels):
    assert "; ".join(bar.label.removeprefix("k K = 2, 1.0 accepted, ") for bar in bars_of(*rows)) == labels


def test_engines_are_compared_by_time_per_token():
    drafting = engine(num_speculative_tokens=4, accepted=2.0, host_us=[1, 1, 1])
    assert [(bar.label, bar.us.p50, bar.us.p80) for bar in bars_of(engine(strategy=""), drafting)] == [
        ("k K = 4, 2.0 accepted", 10.0, 20.0),
        ("k plain", 30.0, 60.0),
    ]


def test_trees_and_chains_are_separated_by_token_count():
    rows = [timing(case="tree-verify", num_tokens=count, tree=tree) for count in (16, 64) for tree in (False, True)]
    (section,) = sections_of(*rows)
    assert [(panel.title.split(", ")[1], [bar.label for bar in panel.bars]) for panel in section.panels] == [
        ("16 query tokens each", ["k a chain", "k a tree"]),
        ("64 query tokens each", ["k a chain", "k a tree"]),
    ]
