"""A module in a separate process finds what this process finds, from any working directory."""

import math
import sys

from spec_decode.testing.process_isolation import TimeLimit, python_module, start_isolated

LIMIT = TimeLimit(math.inf, "a message")
SCRIPT = """
import json, os, sys
import colorsys
where = {"file": colorsys.__file__, "path": sys.path, "request": json.loads(sys.argv[2])}
os.write(int(sys.argv[1]), json.dumps(where).encode() + b"\\n")
"""


def run_isolated(module: str) -> dict:
    with start_isolated(python_module(module), {"n": 1}) as process:
        (message,) = process.messages(LIMIT, LIMIT)
    return message


def test_local_folder_hides_no_package(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "says.py").write_text(SCRIPT)
    (tmp_path / "colorsys").mkdir()
    (tmp_path / "colorsys" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "mine"), *(place for place in sys.path if place)])
    monkeypatch.chdir(tmp_path)
    message = run_isolated("says")
    assert not message["file"].startswith(str(tmp_path))
    assert message["path"] == sys.path and message["request"] == {"n": 1}
