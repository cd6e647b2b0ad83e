import json

import pytest


def test_matrix_finds_the_reports_below_the_current_folder(reports, run):
    result = run("matrix")
    assert result.exit_code == 0 and "verified 1/1" in result.output


def test_matrix_takes_files_and_folders(reports, run):
    assert "verified 1/1" in run("matrix", reports).output
    assert "verified 1/1" in run("matrix", reports.parent).output


def test_matrix_on_standard_output_is_nothing_else(reports, run):
    assert run("matrix", "--markdown", "-").output.startswith("| row | backend")
    assert json.loads(run("matrix", "--json", "-").output)["schema"] == "attn-matrix/1"


def test_matrix_writes_files(reports, tmp_path, run):
    assert run("matrix", "--markdown", "out/m.md", "--json", "out/m.json").exit_code == 0
    assert (tmp_path / "out" / "m.md").exists() and (tmp_path / "out" / "m.json").exists()


def test_matrix_runs_afresh(checks, run):
    result = run("matrix", "--run", "torch_reference", "--device", "cpu")
    assert "verified 1/1" in result.output and len(checks.calls) == 1


def test_matrix_without_reports_says_how_to_get_some(refused):
    assert "--run available" in refused("matrix")


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "other/9"}', '{"schema": "attn-report/1"}'])
def test_matrix_refuses_what_is_no_report(tmp_path, content, refused):
    (tmp_path / "bad.json").write_text(content)
    assert "bad.json" in refused("matrix", "bad.json")


def test_matrix_refuses_a_missing_report(refused):
    assert "absent.json" in refused("matrix", "absent.json")
