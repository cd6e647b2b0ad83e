import pytest

from benchmarks.cases.cpu import cpu_rows
from spec_decode.models.checkpoints.files import CheckpointError
from tests.spec_decode.llm.test_published import write_model, write_tokenizer


@pytest.mark.slow
def test_every_cpu_part_has_rows_for_both_libraries(bench, tmp_path):
    for name in ("target", "draft"):
        write_model(tmp_path / name, vocab_size=200)
        write_tokenizer(tmp_path / name)
    rows = list(cpu_rows(bench, tmp_path / "target", tmp_path / "draft", prompt=20))
    parts = [(row["case"], row["peer"], row["num_speculative_tokens"]) for row in rows]
    three = [(False, 0), (True, 0), (False, 4)]
    wanted = [(f"cpu/{part}", *each) for part in ("load", "prompt", "decode") for each in three]
    assert parts == [*wanted, ("cpu/memory", False, 0), ("cpu/memory", True, 0)]
    assert all(row["wall_us"]["p50"] > 0 for row in rows[:9])
    assert all(row["resident_bytes"] is None or row["resident_bytes"] > 1 << 20 for row in rows[9:])


def test_missing_model_error_names_make_target(bench, tmp_path):
    with pytest.raises(CheckpointError, match=r"Run make smollm2"):
        next(cpu_rows(bench, tmp_path / "none"))
