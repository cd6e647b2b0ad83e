"""A file written by several processes is always one of theirs, complete."""

import json
import os
import subprocess
import sys

import msgspec
import pytest

from spec_decode.files import ReportError, report_bytes, require_unedited, write_whole

WRITER = """
import sys
from pathlib import Path
from spec_decode.files import report_bytes, write_whole
for _ in range(60):
    write_whole(Path(sys.argv[1]), report_bytes({"by": sys.argv[2], "numbers": list(range(int(sys.argv[3])))}))
"""


@pytest.mark.slow
def test_two_processes_writing_one_file_leave_it_complete(tmp_path):
    path = tmp_path / "out" / "report.json"
    sizes = {"one": 20_000, "two": 30_000}
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name, str(size)]) for name, size in sizes.items()]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            found = msgspec.json.decode(path.read_bytes())
            assert len(found["numbers"]) == sizes[found["by"]]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert list(path.parent.iterdir()) == [path]


def test_full_disk_leaves_old_file_only(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_whole(path, b"old")

    def full(self, content):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_write_follows_link_and_keeps_it(tmp_path):
    path, file = tmp_path / "report.json", tmp_path / "elsewhere" / "report.json"
    path.symlink_to(file)
    for content in (b"one", b"two"):
        write_whole(path, content)
        assert path.is_symlink() and file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]


def test_pipe_without_reader_is_rejected(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)

    with pytest.raises(OSError, match="No such device or address"):
        write_whole(path, b"new")
    assert path.is_fifo()


def test_pipe_with_reader_is_written(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    write_whole(path, b"new")

    assert os.read(reader, 10) == b"new"
    os.close(reader)


def test_report_bytes_hold_the_document_and_its_seal():
    document = {"schema": "x/1", "sources": {"parts": {"numerics": [0, 1, 2]}}, "rows": [{"us": 1.5}, {"us": 2.5}]}
    written = json.loads(report_bytes(document))
    assert written == {**document, "digest": written["digest"]}
    require_unedited(written, "r.json")
    written["rows"][1]["us"] = 0.5
    with pytest.raises(ReportError, match="was changed after it was written"):
        require_unedited(written, "r.json")
