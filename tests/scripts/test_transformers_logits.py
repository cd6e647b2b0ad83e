"""The comparison with `transformers`, small and on the CPU: it passes what is right and fails what is not."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from attn_backends.torch_reference import TorchReference
from spec_decode.drafter import GraphMode

pytest.importorskip("transformers").logging.set_verbosity_error()

from scripts import transformers_logits as script  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(script.SIZES, "num_hidden_layers", 2)
    monkeypatch.setitem(script.SIZES, "intermediate_size", 32)
    monkeypatch.setattr(script, "NEW_TOKENS", 9)


@cache
def subject(dtype):
    return script.ModelUnderTest.make("gpt_oss", dtype, CPU)


def test_a_model_gets_a_row_for_each_phase_of_a_backend_and_the_reasons_of_one_that_refuses():
    rows = script.rows_of("gpt_oss", torch.float32, CPU, "torch_reference")
    (refused,) = script.rows_of("gpt_oss", torch.float32, CPU, "triton_mla")

    assert [row["phase"] for row in rows] == [*script.PHASES, "speculation_none", "speculation_full"]
    assert all(row["ok"] and row["error"] <= row["budget"] and row["seconds"] >= 0 for row in rows)
    assert refused["ok"] and any(reason.startswith("sliding: ") for reason in refused["refused"])


class WrongScale(TorchReference):
    def forward(self, query, cache, metadata, *, spec, sinks=None):
        spec = replace(spec, scale=1.25 * spec.scale)
        return super().forward(query, cache, metadata, spec=spec, sinks=sinks)


class OthersSinks(TorchReference):
    def forward(self, query, cache, metadata, *, spec, sinks=None):
        return super().forward(query, cache, metadata, spec=spec, sinks=sinks.flip(0))


class ShortWindow(TorchReference):
    class builder(TorchReference.builder):
        def build(self, batch, *, horizon=0):
            metadata = super().build(batch, horizon=horizon)
            if self.spec.sliding_window:
                metadata.kv_start.add_(1).clamp_(max=metadata.kv_end - 1)
            return metadata


class Nan(TorchReference):
    def forward(self, *args, **options):
        return super().forward(*args, **options) * torch.nan


@pytest.mark.parametrize("broken", [WrongScale, OthersSinks, ShortWindow, Nan])
def test_even_in_bfloat16_a_little_wrong_is_over_the_budget(broken):
    right = script.phase_row(subject(torch.bfloat16), TorchReference(), "verify")
    wrong = script.phase_row(subject(torch.bfloat16), broken(), "verify")

    assert right["ok"] and not wrong["ok"] and wrong["error"] > 2 * wrong["budget"]


def test_a_draft_that_attends_at_wrong_positions_is_not_ok(monkeypatch):
    monkeypatch.setattr(script.TargetAsDraft, "position_offset", 0)

    row = script.speculation_row(subject(torch.float32), TorchReference(), GraphMode.NONE)

    assert row["error"] <= row["budget"] and not row["ok"] and row["accepted_of_target_as_draft"] < 1


def test_a_token_that_the_model_would_not_say_is_off_by_more_than_the_budget():
    model, request = subject(torch.float32), script.Request(prompt=[1, 2, 3], max_new_tokens=1)
    logits = model.exact(torch.tensor([[1, 2, 3]])).logits[0, -1]

    assert script.regret(model, request, [int(logits.argmax())]) == 0
    assert script.regret(model, request, [int(logits.topk(2).indices[1])]) > model.budget
    assert script.regret(model, request, []) == float("inf")


def test_a_model_that_cannot_be_built_is_a_row_with_the_error(monkeypatch):
    monkeypatch.setitem(script.MODELS, "llama", ("NoSuchConfig", {}))

    [row] = script.rows_of("llama", torch.float32, CPU, "torch_reference")

    assert not row["ok"] and row["phase"] == "build" and "NoSuchConfig" in row["failed"]


def test_the_rows_of_all_parts_are_one_report_that_says_when_it_is_whole(tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--models", "llama", "--backends", "triton_mla", "--jobs", "1", "--json", str(path)]
    with pytest.raises(SystemExit):
        script.main(arguments)  # nothing that is refused shows that anything is right

    report = json.loads(path.read_text())
    assert report["finished"] and {row["dtype"] for row in report["rows"]} == {"bfloat16", "float32"}
    assert all(row["refused"] for row in report["rows"])
    assert all(line.split()[1] == "s" for line in capsys.readouterr().out.splitlines())
