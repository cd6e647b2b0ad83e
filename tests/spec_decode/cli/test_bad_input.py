"""Bad input around the command line: numbers, names, paths, pipes, disks, interrupts. Never a traceback."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from spec_decode.__main__ import main as run_main
from spec_decode.cli.main import main
from spec_decode.cli.output import write
from spec_decode.conformance import runner
from spec_decode.llm import TextChunk
from tests.factories import install_plug_in
from tests.spec_decode.cli.conftest import invoke
from tests.spec_decode.cli.test_cli_draft import draft_words

COMMAND = [sys.executable, "-m", "spec_decode"]
ROOT = Path(__file__).parents[3]
HUGE = "99999999999999999999"
NAMED = "check torch_reference --device cpu --only contract.version_matches"


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--page-size", ["0", "-1", "1.5", str(10**9), HUGE, "nan", ""]),
        ("-k", ["-1", "1.5", str(10**9), HUGE, "x", ""]),
        ("--max-tokens", ["0", "-1", "1.5", str(10**9), HUGE, ""]),
        ("--max-model-len", ["0", "1", "-1", "1.5", str(10**9), HUGE, ""]),
        ("--top-k", ["-1", "1.5", HUGE]),
        ("--seed", ["1.5", HUGE, "x"]),
        ("--temperature", ["-1", "nan", "inf", "x"]),
        ("--top-p", ["0", "-1", "1.5", "nan", "inf"]),
        ("--verify", ["", "synthetic:", "synthetic:nan", "synthetic:-1", "blok"]),
        ("--strategy", ["", "ful_loop"]),
        ("--backend", ["", "torch_referense"]),
        ("--draft", ["", "absent", "../pair"]),
        ("--device", ["", "cpu:7", "cuda:-1", "cuda:99", "meta", "tpu", f"cuda:{HUGE}"]),
        ("--target", ["", "absent", "a_file"]),
        ("--prompts", ["absent", ".", "bytes"]),
        ("--tree", ["", "4y", "absent", ".", "bytes", "0x4", "4x0", "4x64"]),
    ],
)
def test_draft_exits_2_with_message_for_bad_value(pair, option, values, run, tmp_path):
    (tmp_path / "a_file").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for value in values:
        result = run(*draft_words(pair, "x", option, value))
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (value, result.exception)
        assert "rror: " in result.stderr and "Traceback" not in result.output and "[Errno" not in result.output


VERBS = ["list", "check torch_reference", "matrix --run torch_reference", "bench", "doctor", "demo"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("device", ["", "cpu:7", "meta", "tpu", f"cuda:{HUGE}"])
def test_every_command_refuses_an_invalid_device(verb, device, refused):
    assert "cpu, cuda or cuda:N" in refused(*verb.split(), "--device", device)


@pytest.mark.parametrize(
    "words",
    [
        "check torch_reference --device cpu --rounds 5000",
        "check torch_reference --device cpu --family soak --rounds 1.5",
        "check torch_reference --device cpu --family soak --rounds 9",
        f"check torch_reference --device cpu --family soak --seed {HUGE}",
        "bench raund --device cpu",
        "bench round --device cpu --json .",
        "bench round --device cpu --json a_file/x",
        "doctor --device cpu --validate-metadata torch_referense",
        f"doctor --device cpu --validate-metadata torch_reference --page-size {HUGE}",
        "doctor --device cpu --rounds 5",
        "doctor --device cpu --every 1",
        "doctor --device cpu --page-size 16",
        "matrix absent",
        "matrix a_file",
        "matrix --run torch_referense --device cpu",
        "matrix --run torch_reference --device cpu --check-limit nan",
        f"{NAMED} --threads 0",
        f"{NAMED} --json a_file/x",
        f"{NAMED} --json -",
        f"{NAMED} --json {HUGE * 15}.json",
        f"bench round --device cpu --json {HUGE * 15}",
        f"matrix {HUGE * 15}",
        "lsit",
        "list --devise cpu",
    ],
)
def test_every_verb_exits_2_for_unusable_argument(words, run, tmp_path):
    (tmp_path / "a_file").touch()
    result = run(*words.split())
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert "rror: " in result.stderr and result.stderr.count("\n") <= 4


def test_out_of_memory_is_one_line_error(pair, monkeypatch, refused):
    def exhausted(*_, **__):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes.")

    monkeypatch.setattr("spec_decode.llm.LLM.stream", exhausted)
    assert "does not fit the memory" in refused(*draft_words(pair, "x"))


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """A shell without job control has its background commands, and their children, ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(words: str, tmp_path: Path, **options) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return subprocess.Popen(
        [*COMMAND, *words.split()], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, **options
    )


def test_closed_pipe_ends_verb_silently(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    process = start("--help", tmp_path, stdout=writer)
    os.close(writer)
    assert process.communicate()[1] == "" and process.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.slow
def test_full_disk_is_one_line_error(tmp_path):
    with open("/dev/full", "w") as full:
        process = start("list --device cpu", tmp_path, stdout=full)
    error = process.communicate()[1]
    assert process.returncode == 2 and "No space left on device" in error and error.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_device_file_is_written_not_replaced(reports, refused_after):
    assert "No space left on device" in refused_after("matrix", reports, "--json", "/dev/full")
    assert Path("/dev/full").is_char_device()


def test_unwritable_link_is_rejected_before_running(checks, refused, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "report.json").symlink_to("file/report.json")
    assert "cannot be written" in refused("check", "torch_reference", "--json", "report.json") and not checks.calls


@pytest.mark.slow
def test_interrupt_exits_130_and_keeps_old_report(tmp_path):
    (tmp_path / "report.json").write_text("old")
    process = start("check torch_reference --device cpu --json report.json", tmp_path, stdout=subprocess.DEVNULL)
    assert process.stderr.readline() == "torch_reference: starting\n"
    process.send_signal(signal.SIGINT)
    error = process.communicate()[1]
    assert process.returncode == 130 and "Traceback" not in error and "interrupted" in error
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "old"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"])
def test_swallowed_interrupt_still_ends_check(monkeypatch, tmp_path, number, status):
    real = runner.run

    def run(*arguments, **options):
        with suppress(KeyboardInterrupt):  # as an import inside a bare except does
            signal.raise_signal(number)
        return real(*arguments, **options)

    monkeypatch.setattr(runner, "run", run)
    result = invoke(*NAMED.split(), "--no-isolate", "--json", tmp_path / "report.json")
    assert result.exit_code == status and "interrupted in torch_reference: no report" in result.stderr
    assert not (tmp_path / "report.json").exists()


def test_permission_error_without_path_is_a_bug(monkeypatch):
    monkeypatch.setattr(runner, "run", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    result = invoke(*NAMED.split(), "--no-isolate")
    assert isinstance(result.exception, PermissionError) and "None cannot be used" not in result.output


def test_verb_runs_in_a_thread_without_signals():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(invoke, *NAMED.split(), "--no-isolate").result().exit_code == 0


def test_interrupt_within_text_ends_its_line(monkeypatch, pair, run):
    def interrupted(*arguments, **options):
        yield TextChunk(index=0, text="half a line", token_ids=[])
        raise KeyboardInterrupt

    monkeypatch.setattr("spec_decode.llm.LLM.stream", interrupted)
    result = run(*draft_words(pair, "x"))
    assert result.exit_code == 130 and result.stdout.endswith("half a line") and result.stderr == "\ninterrupted\n"


def test_interrupt_during_import_exits_130(monkeypatch, capsys):
    class Interrupted(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "spec_decode.cli.main", Interrupted("main"))
    with pytest.raises(SystemExit) as ended:
        run_main()
    assert ended.value.code == 130 and capsys.readouterr().err == "\ninterrupted\n"


def test_interrupt_in_executed_string_exits_130(tmp_path):
    (tmp_path / "interrupted.py").write_text(
        "import contextlib, sys, types\n"
        "def main(**options):\n"
        "    with contextlib.suppress(KeyboardInterrupt):\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    sys.exit(130)\n"
        "sys.modules['spec_decode.cli.main'] = types.SimpleNamespace(main=main)\n"
        "from spec_decode.__main__ import main\n"
        "main()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, env=env).returncode == 130


@pytest.mark.slow
def test_plug_in_thread_does_not_block_exit(tmp_path):
    install_plug_in(
        tmp_path,
        "lender",
        "lent",
        "import threading\n"
        "from attn_backends.torch_reference import TorchReference as Backend\n"
        "threading.Thread(target=threading.Event().wait, name='watcher').start()\n",
    )
    nonsense = {
        **dict.fromkeys(("COLUMNS", "TERM", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"), "nonsense"),
        "TRITON_CACHE_DIR": "/dev/null/x",
        "ATTN_BACKENDS_FA3_PROVIDER": "nonsense",
        "PYTHONIOENCODING": "ascii",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
    }
    process = start("list --device cpu", tmp_path, env=nonsense, stdout=-1)
    printed, error = process.communicate()
    assert process.returncode == 0 and "lent" in printed and "not waiting for watcher" in error
    assert "Traceback" not in error


def test_two_threads_writing_one_file_leave_one_output(tmp_path):
    threads = [threading.Thread(target=write, args=(tmp_path / "out", letter * 100_000)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "out").read_text() in ("a" * 100_000, "b" * 100_000)


def test_unprintable_text_is_escaped(pair):
    words = f"draft \u00e9 --device cpu --target {pair} --max-tokens 1 --strategy eager"
    result = CliRunner(charset="ascii").invoke(main, words.split())
    assert result.exit_code == 0 and "\\xe9" in result.stdout, result.output
