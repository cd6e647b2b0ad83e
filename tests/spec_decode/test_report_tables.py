"""Rows read back from tables are unchanged, and an invalid table is rejected."""

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_decode.files import ReportError, read_json, report_bytes, require_unedited
from spec_decode.report_tables import MalformedTable, indices, packed, runs, unpacked

NAMES = st.sampled_from(["case", "backend", "num_reqs", "gpu_us"])
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
CELLS = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), SCALARS, max_size=3)
ROWS = [
    {"case": "round", "backend": "triton_paged", "num_reqs": 1, "gpu_us": [1.0, 2.0, 3.0]},
    {"case": "round", "backend": "triton_paged", "num_reqs": 4, "gpu_us": [1.5, 2.5, 3.5]},
    {"case": "advance", "backend": "shared"},
    {"case": "round", "backend": "flashinfer", "num_reqs": 1, "gpu_us": [1.1, 2.1, 3.1]},
]


def as_written(rows):
    return msgspec.json.decode(msgspec.json.encode(packed(rows)))


@given(st.lists(st.dictionaries(NAMES, CELLS, min_size=1), min_size=1, max_size=8))
def test_rows_come_back_as_they_were(rows):
    found = unpacked(as_written(rows))
    assert msgspec.json.encode(found, order="sorted") == msgspec.json.encode(rows, order="sorted")


def test_what_rows_share_stands_once():
    rows = [{"case": "the name of a case", "limit": "a long word" if i % 2 else "another", "us": i} for i in range(9)]
    [table] = as_written(rows)["tables"]
    assert table["same"] == {"case": "the name of a case"} and table["values"] == {"limit": ["another", "a long word"]}
    assert table["fields"] == ["limit", "us"] and table["rows"][:2] == [[0, 0], [1, 1]] and "places" not in table


def test_equal_numbers_of_other_types_are_kept_apart():
    rows = [{"value": value} for value in (1, 1.0, True, 1, 1.0, True)]
    assert [type(row["value"]) for row in unpacked(as_written(rows))] == [int, float, bool] * 2


def test_rows_of_other_fields_keep_their_places():
    tables = as_written(ROWS)["tables"]
    assert [table["places"] for table in tables] == ["0-1,3", "2"]
    assert unpacked({"tables": tables}) == ROWS


def test_a_field_that_is_no_name_is_refused():
    with pytest.raises(ValueError, match=r"must be a name, got 'a\.b'"):
        packed([{"a.b": 1}])


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"fields": ["a"], "rows": [[1, 2]]}, "a row has 2 cells, its table 1 fields"),
        ({"fields": ["a"], "values": {"a": ["x"]}, "rows": [[1]]}, "a has 1 values, a row refers to number 1"),
        ({"fields": ["a"], "values": {"a": ["x"]}, "rows": [[-1]]}, "refers to number -1"),
        ({"fields": ["a"], "values": {"a": ["x", "y"]}, "rows": [[True]]}, "refers to number True"),
        ({"fields": ["a"], "places": "0-1", "rows": [[1]]}, "has 1 rows and 2 places"),
        ({"fields": ["a"], "places": "1", "rows": [[1]]}, "are not 0, 1, 2"),
        ({"fields": ["a"], "places": "0,0", "rows": [[1], [2]]}, "are not 0, 1, 2"),
        ({"fields": ["a"], "places": [0], "rows": [[1]]}, "places"),
        ({"fields": ["a", "a.b"], "rows": [[1, 2]]}, "a is a value and has fields"),
        ({"fields": ["a"]}, "missing required field `rows`"),
        ({"fields": ["a"], "rows": [[1]], "colour": 1}, "colour"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path, table, why):
    with pytest.raises(MalformedTable, match=why):
        unpacked({"tables": [table]})
    (tmp_path / "r.json").write_bytes(msgspec.json.encode({"rows": {"tables": [table]}}))
    with pytest.raises(ReportError, match=f"r.json has a malformed table or index: .*{why}"):
        read_json(tmp_path / "r.json")


@given(st.lists(st.integers(0, 40)))
def test_indices_come_back_from_runs_in_their_order(found):
    assert indices(runs(found)) == found


def test_indices_that_follow_one_another_are_a_run():
    assert [runs(found) for found in ([], [3], [0, 1, 2, 5, 6, 4], range(90_000))] == ["", "3", "0-2,5-6,4", "0-89999"]


@pytest.mark.parametrize(
    "text", ["-1", "1-", "a", "1,,2", "1 - 2", "5-3", "٣", "0-9999999", "0-60000,0-60000", "1" * 9]
)
def test_indices_that_are_no_runs_are_refused(tmp_path, text):
    with pytest.raises(MalformedTable, match="ind"):
        indices(text)
    (tmp_path / "r.json").write_bytes(msgspec.json.encode({"sources": {"parts": {"numerics": text}}}))
    with pytest.raises(ReportError, match=r"r.json has a malformed table or index: .*ind"):
        read_json(tmp_path / "r.json")


def test_the_parts_of_a_reports_sources_are_written_as_runs_under_the_same_seal(tmp_path):
    document = {"schema": "x/1", "sources": {"modules": {}, "parts": {"numerics": [*range(20), 25, 21]}}}
    (tmp_path / "r.json").write_bytes(report_bytes(document))
    assert b'"numerics":"0-19,25,21"' in (tmp_path / "r.json").read_bytes()
    found = read_json(tmp_path / "r.json")
    require_unedited(found, "r.json")
    assert found["sources"] == document["sources"]


def test_a_seal_is_of_the_rows_and_not_of_how_they_are_written(tmp_path):
    path = tmp_path / "r.json"
    path.write_bytes(report_bytes({"schema": "x/1", "rows": ROWS}))
    document = read_json(path)
    require_unedited(document, "r.json")
    path.write_bytes(msgspec.json.encode(document))
    assert read_json(path) == document
    path.write_bytes(report_bytes({"schema": "x/1", "rows": ROWS}).replace(b"flashinfer", b"flashinfes"))
    with pytest.raises(ReportError, match="was changed after it was written"):
        require_unedited(read_json(path), "r.json")


def test_a_report_is_printed_with_its_rows_written_out(tmp_path):
    (tmp_path / "r.json").write_bytes(report_bytes({"schema": "x/1", "rows": ROWS}))
    command = [sys.executable, "-m", "spec_decode.files", str(tmp_path / "r.json")]
    shown = msgspec.json.decode(subprocess.run(command, check=True, capture_output=True).stdout)
    assert shown["rows"] == ROWS
