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


def test_columns_come_in_groups_and_numbers_in_their_order():
    tags = ["feature:sinks", "page:128", "page:16", "page:4", "mode:decode", "graph:advance", "mode:prefill"]
    columns = build_matrix([report(result("pass", *tags))]).columns
    assert [column.tag for column in columns] == [
        "mode:prefill", "mode:decode", "graph:advance", "page:4", "page:16", "page:128", "feature:sinks",
    ]  # fmt: skip


def test_a_tag_that_nobody_knows_gets_a_column_of_its_own_at_the_end():
    columns = build_matrix([report(result("pass", "moon:full", TAG, "odd"))]).columns
    assert [(column.label, column.group) for column in columns[1:]] == [("moon full", "moon"), ("odd", "odd")]


def test_a_claim_makes_a_column_without_a_check():
    assert statuses(build_matrix([report(claims={"page:64": True})])) == [["claimed"]]


def test_only_the_columns_asked_for_are_made():
    matrix = build_matrix([report(result("pass", "page:4", "dim:64"), claims={"page:1": True})], tags=["page:*"])
    assert [column.tag for column in matrix.columns] == ["page:1", "page:4"]


def test_a_result_counts_in_every_column_that_it_is_tagged_with():
    assert statuses(build_matrix([report(result("fail", "page:4", "dim:64"), result("pass", "page:4"))])) == [
        ["broken", "broken"]
    ]


def test_a_result_without_a_tag_counts_for_its_family():
    untagged = msgspec.structs.replace(result("fail"), tags=())
    matrix = build_matrix([report(untagged, result("pass"))])
    assert [column.tag for column in matrix.columns] == [TAG, "family:numerics"]
    assert statuses(matrix) == [["verified", "broken"]]


def test_what_holds_for_everything_fills_only_what_has_nothing_of_its_own():
    whole = result("unavailable", EVERYTHING, reason="no package")
    matrix = build_matrix([report(result("pass", "page:4"), result("pass", "dim:64"), backend="a"), report(whole)])
    assert statuses(matrix)[1] == ["unknown", "unknown"]
    assert matrix.rows[1].cells["page:4"].evidence[0].notes[0].reason == "no package"
    both = build_matrix([report(result("pass", "page:4"), whole, claims={"page:4": True, "dim:64": False})])
    assert statuses(both) == [["verified", "unknown"]]


def test_a_backend_that_claims_nothing_on_a_device_claims_no_column():
    nothing = Claim(claimed=False, reason="runs on cuda, not on cpu")
    row = build_matrix(
        [report(result("unsupported", EVERYTHING), claims={EVERYTHING: nothing}), report(result("pass"), backend="a")]
    ).rows[1]
    assert row.cells[TAG].status is Status.REFUSED and row.cells[TAG].claim == nothing


def test_the_version_checked_last_stands_first():
    rows = build_matrix([report(version="1", date=NEW), report(version="2", date=OLD)]).rows
    assert [row.version for row in rows] == ["1", "2"]


def test_rows_are_versions_on_devices_and_gpus_come_first():
    reports = [
        report(backend="b", device="x"), report(backend="a", device="z", cuda=None),
        report(backend="a", device="x"), report(backend="a", device="x", version="2"),
    ]  # fmt: skip
    rows = build_matrix(reports).rows
    assert [(row.device, row.backend) for row in rows] == [("x", "a"), ("x", "a"), ("x", "b"), ("z", "a")]


def test_runs_of_one_version_share_a_row_and_are_not_averaged():
    reports = [report(result("fail"), date=OLD), report(result("pass"), result("pass"), date=NEW)]
    matrix = build_matrix(reports)
    (row,) = matrix.rows
    assert [matrix.runs[run].env.date for run in row.runs] == [NEW, OLD]
    assert row.cells[TAG].text == "verified 2/2; earlier broken 0/1" and row.cells[TAG].conflict


def test_a_newer_partial_run_leaves_the_other_columns_to_the_older_one():
    older = report(result("pass", "page:4"), result("pass", "dim:64"), date=OLD)
    newer = report(result("fail", "page:4"), date=NEW)
    matrix = build_matrix([older, newer])
    assert statuses(matrix) == [["broken", "verified"]]
    assert matrix.runs[matrix.rows[0].cells["dim:64"].evidence[0].run].env.date == OLD


def test_every_piece_of_evidence_names_its_run():
    matrix = build_matrix([report(result("pass"), device="x"), report(result("pass"), device="y")])
    for row in matrix.rows:
        assert matrix.runs[row.cells[TAG].evidence[0].run].env.device == row.device


def test_a_cell_has_the_command_that_checks_it_again():
    gpu, cpu = (build_matrix([report(result("pass"), cuda=cuda)]).rows[0].cells[TAG] for cuda in ("13.0", None))
    assert gpu.repro == "attn-backends matrix --run k --device cuda --tag mode:decode"
    assert "--device cpu" in cpu.repro


def test_a_row_of_an_engines_builder_names_the_engine_and_repeats_with_it():
    row = build_matrix([report(result("pass"), backend="Builder", version="1.2", engine="engine 1.2")]).rows[0]
    assert row.title == "engine 1.2: Builder"
    assert row.cells[TAG].repro == "attn-backends check --engine engine Builder"


def test_an_older_version_is_stale_once_a_newer_one_was_checked_there():
    reports = [report(version="1", date=OLD), report(version="2", date=NEW), report(version="1", device="y", date=OLD)]
    stale = {(row.device, row.version): row.stale for row in build_matrix(reports).rows}
    assert stale == {
        ("NVIDIA H200", "1"): ("version 2 was checked on this device later, on 2026-02-01",),
        ("NVIDIA H200", "2"): (),
        ("y", "1"): (),
    }


def test_another_version_than_the_present_one_is_stale():
    rows = build_matrix([report(version="1"), report(backend="other")], current={"k": "1.1"}).rows
    assert [row.stale for row in rows] == [("version 1.1 is installed now",), ()]


def test_evidence_for_another_contract_is_stale():
    assert "built for contract 0.9" in build_matrix([report(contract="0.9")]).rows[0].stale[0]


def test_the_json_carries_a_nan_by_name_and_the_status_of_each_cell():
    data = to_json(build_matrix([report(result("fail", evidence={"error_over_budget": math.nan}))]))
    cell = msgspec.json.decode(data)["rows"][0]["cells"][TAG]
    assert (cell["status"], cell["evidence"][0]["worst"]) == ("broken", "nan")


def test_no_reports_make_a_matrix_without_rows():
    assert build_matrix([]).rows == () and build_matrix([]).columns == ()


def test_a_draft_that_leaves_eager_drafting_is_broken():
    (row,) = build_matrix([], [agreement(unlike_eager=1)]).drafters
    assert row.cells[0].status is Status.BROKEN


@pytest.mark.parametrize("unlike", ["unlike_plain", "unlike_alone"])
def test_a_text_that_leaves_plain_decodings_or_the_one_alone_breaks_a_cell_that_rounding_cannot_excuse(unlike):
    def status(**fields):
        (row,) = build_matrix([], [agreement(**fields, **{unlike: 1})]).drafters
        return row.cells[0].status

    assert status(dtype="float32") is status(dtype="bfloat16", batch_invariant=True) is Status.BROKEN
    assert status(dtype="bfloat16") is Status.VERIFIED


def test_a_refused_strategy_is_refused_with_its_reason():
    (row,) = build_matrix([], [agreement(refusal="needs a graph", accepted=None)]).drafters
    assert row.cells[0].status is Status.REFUSED and row.cells[0].refusal == "needs a graph"


@pytest.mark.parametrize("other", [{"backend": "x"}, {"strategy": "eager"}, {"case": "round/steps"}, {"host_us": None}])
def test_host_time_is_that_of_whole_rounds_of_the_same_backend_and_strategy(other):
    host = [1.0, 2.0, 3.0]
    whole = {"case": "round", "strategy": "full_loop", "num_speculative_tokens": 4, "host_us": host}
    (row,) = build_matrix([], [agreement()], [timing(**whole), timing(**{**whole, **other})]).drafters
    assert [time.us.p50 for time in row.cells[0].host] == [2.0]


def test_runs_of_pairs_stay_apart():
    assert len(build_matrix([], [agreement(), agreement(unlike_eager=2)]).drafters) == 2


def test_one_panel_holds_what_was_timed_at_one_shape():
    rows = [timing(), timing(backend="p", peer=True), timing(num_reqs=32), timing(spec="16/1 heads, mla")]
    sections = build_matrix([], (), rows).speed
    assert [[len(panel.bars) for panel in section.panels] for section in sections] == [[2, 1], [1]]
    assert [(bar.label, bar.peer) for bar in sections[0].panels[0].bars] == [("k", False), ("p", True)]


def test_what_is_sampled_from_is_part_of_the_shape():
    flat, peaked = (
        {"case": "sampling/top-k", "context": None, "spec": f"{kind} logits"} for kind in ("flat", "peaked")
    )
    rows = [timing(**flat), timing(**flat, backend="p", peer=True), timing(**peaked)]
    (section,) = build_matrix([], (), rows).speed
    assert [(panel.title, [(bar.label, bar.spec) for bar in panel.bars]) for panel in section.panels] == [
        ("1 request, flat logits", [("k", ""), ("p", "")]), ("1 request, peaked logits", [("k", "")]),
    ]  # fmt: skip


def test_a_limit_is_drawn_only_on_what_it_limits():
    limited = timing(limits=[limit("kernels_per_step", 1, True), limit("gpu_us", 3, True)])
    ratio = timing(limits=[limit("peer_ratio", 1.15, False)], num_reqs=2)
    bars = [panel.bars[0] for panel in build_matrix([], (), [limited, ratio]).speed[0].panels]
    assert [(bar.limit, bar.met) for bar in bars] == [(3.0, True), (None, False)]


def test_a_limit_on_the_host_is_no_verdict_on_the_gpu():
    host = [90.0, 90.0, 90.0]
    row = timing(case="round", strategy="full_loop", host_us=host, limits=[limit("host_us", 80, False)])
    sections = build_matrix([], (), [row]).speed
    assert [(section.quantity[:3], section.panels[0].bars[0].met) for section in sections] == [
        ("GPU", None), ("hos", False),
    ]  # fmt: skip


def test_a_limit_on_something_else_that_is_drawn_decides_nothing_here():
    row = timing(case="round", strategy="full_loop", limits=[limit("host_us", 80, False), limit("gpu_us", 20, True)])
    (bar,) = build_matrix([], (), [row]).speed[0].panels[0].bars
    assert (bar.limit, bar.met, [found.text for found in bar.limits]) == (20.0, True, ["gpu_us <= 20"])


def test_of_two_limits_one_that_is_open_leaves_the_bar_open():
    (bar,) = (
        build_matrix([], (), [timing(limits=[limit("gpu_us", 20, True), limit("loop_us", 4, None)])])
        .speed[0]
        .panels[0]
        .bars
    )
    assert bar.met is None


def test_a_bar_far_beyond_the_others_does_not_set_the_scale():
    slow = [900.0, 900.0, 900.0]
    rows = [timing(), timing(backend="b"), timing(backend="c", gpu_us=slow)]
    (panel,) = build_matrix([], (), rows).speed[0].panels
    marks = plot(panel, "GPU time").marks
    assert [mark.beyond for mark in marks] == [False, False, True]
    assert marks[0].width == round(WIDTH * 10 / 12, 1) and marks[2].width == WIDTH


def test_bars_of_one_backend_are_told_apart_by_their_specs():
    rows = [timing(case="round", strategy="full_loop", spec=f"32/8 heads{kv}") for kv in ("", ", kv fp8")]
    assert [bar.label for bar in build_matrix([], (), rows).speed[0].panels[0].bars] == ["k", "k kv fp8"]


def test_an_older_timing_of_the_same_stays_and_says_so():
    rows = [timing(env={**timing_env(OLD)}), timing(env={**timing_env(NEW)})]
    assert [bar.label for bar in build_matrix([], (), rows).speed[0].panels[0].bars] == ["k", "k (older)"]


def labels(*rows):
    (section,) = build_matrix([], (), rows).speed
    (panel,) = section.panels
    return [bar.label for bar in panel.bars]


def test_bars_go_from_fast_to_slow_and_what_launches_nothing_comes_first():
    rows = [timing(backend=name, gpu_us=us) for name, us in {"b": [3, 9, 9], "c": [1, 4, 5], "d": [7, 7, 7]}.items()]
    nothing = timing(backend="a", gpu_us=None, kernels_per_step=0, floor_us=None)
    assert labels(*rows, nothing) == ["a", "c", "d", "b"]


def test_rounds_of_one_strategy_are_told_apart_by_their_temperature():
    rows = [timing(case="round", strategy="full_loop", temperature=each) for each in (0.0, 1.0)]
    assert labels(*rows) == ["k temperature 0", "k temperature 1"]
    assert labels(rows[0]) == ["k"]


def test_no_two_bars_of_a_panel_have_one_label():
    once, elsewhere = timing(), timing(command="attn-backends bench again")
    assert labels(once, elsewhere) == ["k (run 1)", "k (run 2)"]
    assert labels(once, once, elsewhere) == ["k (run 1, 1 of 2)", "k (run 1, 2 of 2)", "k (run 2)"]
    assert labels(once, timing(peer=True)) == ["k", "k"]  # a peer has its word and colour


def engine(**fields):
    """A row of a whole engine, whose rounds take 30 us."""
    us = [30.0, 30.0, 60.0]
    row = {"case": "throughput/speculation", "gpu_us": None, "wall_us": us, "per_user": 1.0, "floor_us": None}
    return timing(**{**row, "num_speculative_tokens": 0, **fields})


def test_engines_are_compared_by_the_time_of_a_token_whatever_they_draft():
    drafting = engine(strategy="full_loop", num_speculative_tokens=4, accepted=2.0, host_us=[1, 1, 1])
    (section,) = build_matrix([], (), [engine(), drafting]).speed
    (panel,) = section.panels
    assert [(bar.label, bar.us.p50, bar.us.p80) for bar in panel.bars] == [
        ("k K = 4, 2.0 kept", 10.0, 20.0), ("k plain", 30.0, 60.0),
    ]  # fmt: skip


def test_engines_with_step_0_in_a_graph_or_not_are_told_apart():
    base = {"case": "throughput/extend-graph", "num_speculative_tokens": 2, "accepted": 1.0, "strategy": "full_loop"}
    ways = [{"extend_in_graph": graph, "host_waits": waits} for graph in (False, True) for waits in (False, True)]
    (section,) = build_matrix([], (), [engine(**base, **way) for way in ways]).speed
    assert [bar.label.removeprefix("k K = 2, 1.0 kept, ") for bar in section.panels[0].bars] == [
        "launched", "launched, host waits", "in a graph", "in a graph, host waits",
    ]  # fmt: skip


def test_engines_with_one_graph_a_round_or_two_are_told_apart():
    base = {"case": "throughput/one-graph", "num_speculative_tokens": 4, "accepted": 2.5, "strategy": "full_loop"}
    (section,) = build_matrix([], (), [engine(**base, one_graph=one) for one in (False, True)]).speed
    assert [bar.label for bar in section.panels[0].bars] == [
        "k K = 4, 2.5 kept, two graphs", "k K = 4, 2.5 kept, one graph",
    ]  # fmt: skip


def test_engines_that_draft_in_other_ways_are_told_apart():
    base = {"case": "throughput/block-drafts", "num_speculative_tokens": 7, "accepted": 3.5, "strategy": "full_loop"}
    rows = [engine(**base, draft=draft) for draft in ("EAGLE-3", "DFlash")]
    (section,) = build_matrix([], (), rows).speed
    assert [bar.label for bar in section.panels[0].bars] == ["k K = 7, 3.5 kept, EAGLE-3", "k K = 7, 3.5 kept, DFlash"]


@pytest.mark.parametrize("case", ["block-trees", "block-tree-rounds"])
def test_engines_that_draft_other_trees_of_a_block_are_told_apart(case):
    base = {"case": case, "num_speculative_tokens": 7, "accepted": 3.5, "strategy": "full_loop"}
    rows = [engine(**base, tree=tree != "D", draft=tree) for tree in ("D", "D, 4x7", "D, 8x16")]
    (section,) = build_matrix([], (), rows).speed
    assert section.title.startswith("A whole engine") and [bar.label for bar in section.panels[0].bars] == [
        "k K = 7, 3.5 kept, D in a row", "k K = 7, 3.5 kept, D, 4x7 a tree", "k K = 7, 3.5 kept, D, 8x16 a tree",
    ]  # fmt: skip


def test_a_tree_and_as_many_tokens_in_a_row_are_told_apart_by_their_number():
    rows = [timing(case="tree-verify", num_tokens=count, tree=tree) for count in (16, 64) for tree in (False, True)]
    (section,) = build_matrix([], (), rows).speed
    assert [(panel.title.split(", ")[1], [bar.label for bar in panel.bars]) for panel in section.panels] == [
        ("16 query tokens each", ["k in a row", "k a tree"]),
        ("64 query tokens each", ["k in a row", "k a tree"]),
    ]


def timing_env(date: str) -> dict[str, object]:
    return {**msgspec.to_builtins(timing().env), "date": date}


def test_prompts_of_all_graph_modes_are_counted_together_and_those_of_other_shapes_apart():
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
