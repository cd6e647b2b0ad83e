"""Reports of one study are joined if one machine made them from one commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.join_reports import joined, main
from spec_decode.files import read_json, report_bytes, require_unedited


def report(name: str, hour: int, **more: Any) -> dict[str, Any]:
    env = {"device": "NVIDIA H200", "commit": "1" * 40, "date": f"2026-11-29T{hour}:00:00+00:00"} | more.pop("env", {})
    return {
        "schema": "attn-contexts/1", "env": env, "command": f"python run --only {name}", "sources": {"modules": {}},
        "arms": [{"arm": {"name": name}, "rows": [1]}], "problems": [f"{name}: slow"], "finished": True, **more,
    }  # fmt: skip


def write(folder: Path, *reports: dict[str, Any]) -> list[str]:
    paths = [folder / f"{number}.json" for number in range(len(reports))]
    for path, each in zip(paths, reports, strict=True):
        path.write_bytes(report_bytes(each))
    return [*map(str, paths), "--json", str(folder / "joined.json")]


def test_arms_commands_and_problems_are_joined(tmp_path: Path) -> None:
    agreement = [{"draft": "b"}]
    main(write(tmp_path, report("a", 12), report("b", 11, agreement=agreement), report("c", 10, finished=False)))
    found = read_json(tmp_path / "joined.json")
    require_unedited(found, "joined.json")
    assert [arm["arm"]["name"] for arm in found["arms"]] == ["a", "b", "c"]
    assert found["command"] == "python run --only a && python run --only b && python run --only c"
    assert found["env"] == report("a", 12)["env"] and found["sources"] == {"modules": {}}
    assert found["problems"] == ["a: slow", "b: slow", "c: slow"] and found["finished"] is False
    assert found["agreement"] == agreement and "agreement" not in joined({"a": report("a", 1), "b": report("b", 2)})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (report("b", 11, env={"commit": "2" * 40}), "differ in env.commit. Join reports of one run"),
        (report("b", 11, env={"device": "NVIDIA H100"}), "differ in env.device"),
        (report("b", 11, sources={"modules": {"": {"builders": "1"}}}), "differ in sources"),
        (report("b", 11, schema="attn-vllm/1"), "differ in schema"),
        (report("a", 11), "a is in two of .*0.json, .*1.json. Leave one of these out"),
    ],
)
def test_reports_of_two_runs_are_refused(other: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        main(write(tmp_path, report("a", 12), other))
    assert not (tmp_path / "joined.json").exists()


def test_a_missing_field_is_refused(tmp_path: Path) -> None:
    old = report("b", 11)
    del old["sources"]
    with pytest.raises(SystemExit, match="differ in fields"):
        main(write(tmp_path, report("a", 12), old))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(SystemExit, match=r"list.json has no arms. Name reports of vllm_figures.py"):
        main([str(tmp_path / "list.json"), *write(tmp_path, report("a", 12))])


def test_edited_reports_are_refused(tmp_path: Path) -> None:
    arguments = write(tmp_path, report("a", 12), report("b", 11))
    Path(arguments[0]).write_text(Path(arguments[0]).read_text().replace("slow", "fast"))
    with pytest.raises(SystemExit, match="changed after it was written"):
        main(arguments)


def test_one_report_is_not_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(write(tmp_path, report("a", 12)))
    assert "Name at least two reports" in capsys.readouterr().err
