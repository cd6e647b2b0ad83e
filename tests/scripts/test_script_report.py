"""Code that scripts share: a report's provenance, and usage errors."""

import runpy
import sys

import pytest
import torch

from scripts.script_report import write_report
from spec_decode.files import read_json
from tests.import_graph import ROOT


@pytest.mark.parametrize("given", [["--json", "x.json"], ["--json=x.json"]])
def test_report_command_names_no_output_file(tmp_path, given):
    path = tmp_path / "report.json"
    write_report(
        path, "x/1", torch.device("cpu"), ["builders.errors"], command=["a.py", *given, "--only", "b c"], rows=[1]
    )
    report = read_json(path)
    assert (report["command"], report["rows"]) == ("python a.py --only 'b c' --json FILE", [1])


@pytest.mark.parametrize("script", ["schemas", "unpack_engine"])
def test_script_without_arguments_prints_usage(script, monkeypatch, capsys):
    places = [place for place in sys.path if place not in ("", str(ROOT))]
    monkeypatch.setattr(sys, "path", places)
    monkeypatch.setattr(sys, "argv", [f"scripts/{script}.py"])
    before = [*places]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / f"scripts/{script}.py"), run_name="__main__")
    assert ended.value.code == 2 and f"usage: {script}.py" in capsys.readouterr().err
    # Where it imports from this project, it says where that is: its own folder is all that Python adds.
    assert places == [str(ROOT)] * (script == "schemas") + before
