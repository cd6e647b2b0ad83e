"""A served vLLM that compares its draft metadata: vLLM 0.33's own speculators, over an emulated graph.

See test_vllm_inside.py for what it needs.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attn_backends.engines import vllm as plug_in
from spec_decode.graphs import runtime_for
from tests.engines import vllm_sparse
from tests.engines.vllm_draft_loop import DraftLoop, speculator_of
from tests.engines.vllm_runner import LATENT, NEEDS_VLLM, PAGED, TOKENS, Runner, Tables, backend_of, make_runner
from tests.factories import CPU

pytestmark = NEEDS_VLLM
LENS, EVERY_ROW = [5, 150, 33], [5, 150, 33, 16, 90, 7, 12, 64]


@pytest.fixture(autouse=True)
def installed(monkeypatch, vllm_inside):
    """The validator in vLLM's speculators; afterwards they are as they were."""
    from attn_backends.engines.vllm import validator

    for cls, hooks in {**validator._HOOKS, validator.DraftModelSpeculator: {"set_attn": ""}}.items():
        for name in hooks:
            monkeypatch.setattr(cls, name, getattr(cls, name))
    validator.install()
    yield validator


def flash_attention_schedule(*, seqlens=None, cache_seqlens=None, **rest):
    """For FlashAttention's own op: like its plan, this one depends on every length."""
    lens = seqlens if cache_seqlens is None else cache_seqlens
    return torch.cat([lens.new_zeros(1), lens])


def frozen(metadata):
    return replace(metadata, seq_lens=metadata.seq_lens.clone())


def loop(name):
    return DraftLoop(make_runner(name), attends=False)


def due_validator(engine):
    """The recorder, for which it is time to compare again."""
    recorder = engine.speculator.attn_backends_recorder
    recorder.pace.next = -float("inf")
    return recorder


def assert_no_difference(engine, rounds):
    recorder = due_validator(engine)
    assert (recorder.found, recorder.rounds) == (None, rounds)


@pytest.fixture
def log_lines(installed, monkeypatch):
    """What the validator and its recorders log."""
    lines = []

    def log(text, *values):
        lines.append(text % values)

    from attn_backends.engines.vllm import recorder

    for module in (installed, recorder):
        monkeypatch.setattr(module, "_log", SimpleNamespace(info=log, warning=log, error=log))
    return lines


@pytest.mark.parametrize("name", [*PAGED, *LATENT, "TRITON_ATTN", "FLASH_ATTN"])
def test_right_builder_shows_no_difference(name, log_lines, monkeypatch):
    if name == "FLASH_ATTN":
        from vllm.v1.attention.backends import flash_attn

        monkeypatch.setattr(flash_attn, "get_scheduler_metadata", flash_attention_schedule)
    engine = loop(name)
    for seed, lens in enumerate([LENS, [40, 6, 140, 90], [64]]):
        engine.draft(lens, seed)
        assert_no_difference(engine, seed + 1)
    assert log_lines == [
        f"Draft metadata of {n} rounds was compared with a fresh build: no difference." for n in (1, 2)
    ]


def test_comparing_builders_keep_no_plans(log_lines):
    engine = loop("FLASHINFER_IN_GRAPH")
    for rounds, lens in enumerate([LENS, EVERY_ROW], 1):
        engine.draft(lens)
        assert_no_difference(engine, rounds)
    ((served,),), ((second,),) = engine.speculator.attn_groups, engine.speculator.attn_backends_recorder._groups
    assert served.get_metadata_builder()._plans and not second.get_metadata_builder()._plans


def test_a_paused_recorder_compares_nothing(log_lines):
    engine = loop(PAGED[0])
    engine.draft(LENS)
    recorder = due_validator(engine)
    recorder.paused = True
    engine.draft(LENS, 1)
    assert recorder.rounds == 1
    recorder.paused = False
    engine.draft(LENS, 2)
    assert recorder.rounds == 2


@pytest.mark.parametrize("dtype", ["auto", vllm_sparse.FP8])
def test_sparse_latents_show_no_difference(dtype, log_lines, monkeypatch):
    vllm_sparse.install(monkeypatch)
    vllm_sparse.leave_memory_as_it_was(monkeypatch)
    engine = DraftLoop(vllm_sparse.SparseRunner(dtype))
    for rounds, lens in enumerate([LENS, EVERY_ROW], 1):
        engine.draft(lens, rounds)
        assert_no_difference(engine, rounds)


def test_indexer_with_empty_update_is_reported(log_lines, monkeypatch):
    vllm_sparse.install(monkeypatch)
    runner = vllm_sparse.SparseRunner()
    theirs = type(runner.indexer.get_metadata_builder())
    monkeypatch.setattr(theirs, "update_draft_decode_metadata", lambda self, metadata: None)
    engine = DraftLoop(runner)
    engine.draft(LENS)
    found = due_validator(engine).found
    assert found.group == f"DEEPSEEK_V32_INDEXER ({vllm_sparse.INDEXER})" and found.field.startswith("decode.")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("FLASHINFER_IN_GRAPH", "plan."),
        ("FLASH_ATTN", "scheduler_metadata"),
        *((name, "decode.paged") for name in LATENT),
    ],
)
def test_empty_update_is_reported_with_step_and_field(name, field, log_lines, monkeypatch):
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", flash_attention_schedule)
    if name in LATENT:
        # What is made of the lengths is no view here, and nothing refreshes it.
        builder = backend_of(name).ours.builder
        build = builder.build
        monkeypatch.setattr(builder, "build", lambda self, batch: frozen(build(self, batch)))
    engine = make_runner(name)
    monkeypatch.setattr(type(engine.builder), "update_draft_decode_metadata", lambda self, metadata: None)
    engine = DraftLoop(engine, attends=False)
    engine.draft(LENS)
    found = due_validator(engine).found
    assert found.group == f"{engine.runner.group.backend.get_name()} ({engine.runner.layer_name})"
    assert found.step == TOKENS - 1 and found.field.startswith(field) and "freshly built" in found.what
    assert log_lines[-1].startswith(
        f"Draft metadata differs from the batch: group {found.group}, step 3, field {field}"
    )

    engine.draft([64])
    assert due_validator(engine).rounds == 1 and len(log_lines) == 1, "nothing is compared after a difference"


def test_slots_of_another_step_are_reported(log_lines):
    engine = loop("TRITON_ATTN")
    compute, tables = Tables.compute_slot_mappings, engine.speculator.block_tables
    tables.compute_slot_mappings = lambda ids, starts, positions, n, out=None: compute(
        tables, ids, starts, positions if out is not None else (positions - 1).clamp(min=0), n, out
    )
    engine.speculator.capture()
    engine.draft(LENS)
    assert due_validator(engine).found[:3] == ("all", TOKENS - 1, "slot_mappings[0][0]")


def test_lengths_that_do_not_advance_are_reported(log_lines):
    engine = loop("TRITON_ATTN")
    engine.step = engine.speculator._generate_draft = lambda *rest, **more: engine.runner.positions.add_(1)
    engine.speculator.capture()
    engine.draft(LENS)
    assert due_validator(engine).found.field == "seq_lens[0]"


def test_buffer_replaced_after_capture_is_reported(log_lines):
    engine = loop("TRITON_ATTN")
    engine.speculator.block_tables.input_block_tables = [engine.runner.table.clone()]
    engine.draft(LENS)
    assert (
        due_validator(engine).found.field == "block table 0" and "fills another one" in due_validator(engine).found.what
    )


def test_validator_uses_buffers_of_latest_capture(log_lines):
    engine = loop("TRITON_ATTN")
    engine.runner.table = engine.runner.table.clone()
    engine.speculator.block_tables.input_block_tables = [engine.runner.table]
    engine.speculator.capture()
    engine.draft(LENS)
    assert_no_difference(engine, 1)


def test_second_builders_exist_after_capture(log_lines, monkeypatch):
    engine = loop("TRITON_ATTN")
    monkeypatch.delattr("attn_backends.engines.vllm.recorder._second_builders")
    engine.draft(LENS)
    assert_no_difference(engine, 1)


def test_padding_differences_are_ignored(log_lines):
    engine = loop("TRITON_ATTN")
    compute, tables = Tables.compute_slot_mappings, engine.speculator.block_tables
    tables.compute_slot_mappings = lambda *args, out=None: compute(tables, *args, out=out).masked_fill_(
        tables.slot_mappings < 0, -1 if out is None else -16
    )
    engine.draft(LENS)
    assert_no_difference(engine, 1)


def test_validator_keeps_engine_builders_and_skips_eager_batches(log_lines):
    engine = loop("TRITON_ATTN")
    speculator, captured = engine.speculator, engine.metadata
    groups, longest = speculator.attn_groups, speculator.draft_max_seq_len = speculator.attn_groups, 99
    engine.draft(LENS)
    assert speculator.attn_groups is groups and speculator.draft_max_seq_len == longest
    other = {engine.runner.layer_name: engine.runner.group.build_metadata(engine.runner.common())}
    speculator._generate_fused_drafts(Runner.ROWS, Runner.ROWS, other, None, None, engine.desc.cg_mode, TOKENS)
    (kept,) = due_validator(engine)._captured.values()
    assert kept is captured


def test_comparing_takes_at_most_one_percent_of_time(installed):
    from attn_backends.engines.vllm.recorder import RoundRecorder

    engine, now = loop("TRITON_ATTN"), iter([100.0, 100.0, 101.0, 120.0, 200.9, 201.1, 201.1, 202.0])
    recorder = engine.speculator.attn_backends_recorder = RoundRecorder(engine.speculator, clock=lambda: next(now))
    engine.speculator.capture()
    due_validator = []
    for _ in range(4):  # from 100 to 101, then not at 120 nor at 200.9, and at 201.1
        engine.draft(LENS)
        due_validator.append(recorder.rounds)
    assert due_validator == [1, 1, 1, 2] and recorder.pace.seconds == pytest.approx(1 + 0.9)


def test_dummy_batches_are_skipped_but_their_time_counts(log_lines, installed):
    from attn_backends.engines.vllm.recorder import RoundRecorder

    engine, now = loop("TRITON_ATTN"), iter([100.0, 100.0, 101.0, 200.9, 201.1, 201.1, 202.0])
    recorder = engine.speculator.attn_backends_recorder = RoundRecorder(engine.speculator, clock=lambda: next(now))
    engine.speculator.capture()
    engine.draft(LENS, dummy=True)
    assert (recorder.rounds, recorder.pace.seconds) == (0, 1.0) and log_lines == []
    engine.draft(LENS)
    assert recorder.rounds == 0
    engine.draft(LENS)
    assert recorder.rounds == 1


def test_draft_without_captured_graph_is_logged(log_lines):
    engine = loop("TRITON_ATTN")
    engine.speculator.attn_backends_recorder._captured.clear()
    engine.speculator.decode_cudagraph_manager.capture = lambda *rest, **more: None
    engine.speculator.capture()
    assert log_lines == ["No draft metadata is compared: MTPSpeculator captured no graph that updates its metadata."]


def test_unvalidated_draft_is_logged_with_reason(log_lines, installed):
    from vllm.config.compilation import CUDAGraphMode

    with_graphs, eager = loop("TRITON_ATTN").speculator, loop("TRITON_ATTN").speculator
    compilation = replace(eager.vllm_config.compilation_config, cudagraph_mode=CUDAGraphMode.NONE)
    eager.vllm_config = replace(eager.vllm_config, compilation_config=compilation)
    reason = installed._why_not_compared
    assert reason(with_graphs) == "" and reason(eager) == "No draft metadata is compared: CUDA graphs are off."
    with_graphs.supports_decode_metadata_update = False
    assert reason(with_graphs) == "No draft metadata is compared: vLLM rebuilds it for every step."
    assert reason(SimpleNamespace()) == "Draft metadata of SimpleNamespace is not compared: it drafts in its own way."
    installed._set_attn(SimpleNamespace(speculator=with_graphs), lambda: None, None)
    assert log_lines == [reason(with_graphs)]


def test_block_draft_is_compared_in_its_one_step(installed, log_lines, monkeypatch):
    """DFlash's own propose runs a model; what it calls of the graph stands in for it."""
    cls, runner = installed.DFlashSpeculator, Runner("FLASHINFER_IN_GRAPH", 1 + TOKENS, causal=False)
    update, rows = cls._update_draft_decode_metadata, Runner.ROWS

    def capture(self):
        runner.fill([1 + TOKENS] * rows)
        metadata = runner.group.build_metadata_for_cudagraph_capture(runner.common())
        state = {runner.layer_name: metadata}
        self.graph = runtime_for(CPU).capture(lambda: self._prepare_graph_forward(rows, state))

    def propose(self, input_batch):
        if input_batch.num_reqs <= self.max_rows:
            self._prepare_graph_replay(input_batch, rows, None, None, None, input_batch.dummy)
            self.graph.replay()

    for name, method in {
        "capture": capture,
        "propose": propose,
        "_prepare_graph_forward": lambda self, num_reqs, attn_metadata: update(self, attn_metadata, num_reqs),
        "_prepare_graph_replay": lambda self, input_batch, num_graph_reqs, a, b, c, dummy_run: None,
    }.items():
        monkeypatch.setattr(cls, name, method)
    installed.install()
    own = {"max_rows": rows, "_group_causal": False, "num_query_per_req": 1 + TOKENS, "requires_non_causal": True}
    speculator = speculator_of(cls, runner, **own)
    speculator.capture()
    for lens, dummy in (([25, 150, 33], False), ([64], True), ([40, 90], False)):
        runner.fill(lens)
        runner.starts.copy_(torch.arange(rows + 1).clamp(max=len(lens)) * (1 + TOKENS))
        speculator.idx_mapping[: len(lens)] = torch.arange(len(lens))
        bound = torch.tensor(lens, dtype=torch.int32)
        speculator.propose(SimpleNamespace(num_reqs=len(lens), seq_lens_cpu_upper_bound=bound, dummy=dummy))
        speculator.attn_backends_recorder.pace.next = -float("inf")
    assert speculator.attn_backends_recorder.rounds == 2 and speculator.attn_backends_recorder.found is None

    speculator.max_rows = 1
    speculator.propose(SimpleNamespace(num_reqs=2, seq_lens_cpu_upper_bound=bound, dummy=False))
    assert speculator.attn_backends_recorder.rounds == 2, "no graph was replayed"
    speculator.max_rows = rows

    plan = speculator.attn_backends_recorder._captured[rows, 0][runner.layer_name].plan
    monkeypatch.setattr(plan, "refresh", lambda: None)
    speculator.graph = runtime_for(CPU).capture(lambda: None)
    runner.fill([64, 150])
    speculator.propose(SimpleNamespace(num_reqs=2, seq_lens_cpu_upper_bound=torch.tensor([64, 150]), dummy=False))
    found = speculator.attn_backends_recorder.found
    assert found.step == 0 and found.field.startswith("plan.")


def test_changed_vllm_speculator_is_rejected(installed, monkeypatch):
    from attn_backends.engines.vllm.compat import UnsupportedVllm

    monkeypatch.setattr(installed.TargetDependentARSpeculator, "_fused_multi_step_decode", lambda self, batch: None)
    monkeypatch.setenv(plug_in.VALIDATE, "1")
    with pytest.raises(UnsupportedVllm, match=r"differs in: TargetDependentARSpeculator\._fused_multi_step_decode\."):
        plug_in.register()


def test_validate_variable_installs_once(installed, monkeypatch):
    cls = installed.TargetDependentARSpeculator
    before = cls.capture
    monkeypatch.setenv(plug_in.VALIDATE, "1")
    plug_in.register()
    assert cls.capture is before and before.__wrapped__ is not None


@pytest.mark.parametrize("value", ["", "yes", "2"])
def test_invalid_validate_variable_is_rejected(value, monkeypatch):
    monkeypatch.setenv(plug_in.VALIDATE, value)
    with pytest.raises(ValueError, match="ATTN_BACKENDS_VALIDATE must be 0 or 1, got"):
        plug_in.register()
