"""Builders over tensors that an engine owns and moves itself: no `RequestTables`, and rows with any stride."""

import pytest
import torch

from attn_backends import get
from builders import AttentionBatch, AttentionKind, check_batch
from spec_decode.graphs import runtime_for
from tests import flashinfer_stand_in
from tests.factories import CPU, make_spec
from tests.mutants.mutant import values_of

PAGE, PAGES, ROWS = 16, 6, 3
LATENT = {"kind": AttentionKind.MLA, "num_kv_heads": 1}
SPECS = {
    "torch_reference": {},
    "triton_paged": {"head_dim": 64},
    "triton_mla": {**LATENT, "head_dim": 48, "value_dim": 32},
    "sparse_swa_mla": {**LATENT, "head_dim": 64, "sliding_window": 20},
    "flashinfer": {"head_dim": 64, "dtype": torch.bfloat16},
}


class Engine:
    """An engine's persistent buffers: more rows than a batch has, and a table wider than a request may be."""

    def __init__(self):
        self.query_start_loc = torch.arange(ROWS + 3, dtype=torch.int32)
        self.seq_lens = torch.zeros(ROWS + 2, dtype=torch.int32)
        self.positions = torch.zeros(ROWS + 2, dtype=torch.int64)
        self.slot_mapping = torch.full((ROWS + 2,), -1)
        self.table = torch.zeros(ROWS + 2, PAGES + 5, dtype=torch.int32)

    def fill(self, lens, seed):
        self.table[:ROWS, :PAGES] = torch.randperm(100, generator=torch.Generator().manual_seed(seed))[
            : ROWS * PAGES
        ].view(ROWS, PAGES)
        self.move_to(lens)

    def move_to(self, lens):
        self.seq_lens[:ROWS] = torch.tensor(lens)
        position = self.seq_lens[:ROWS].long() - 1
        self.positions[:ROWS] = position
        page = self.table[torch.arange(ROWS), position // PAGE].long()
        self.slot_mapping[:ROWS] = page * PAGE + position % PAGE

    def batch(self):
        return AttentionBatch(
            num_reqs=ROWS,
            num_tokens=ROWS,
            max_query_len=1,
            max_seq_len=PAGES * PAGE,
            uniform=True,
            query_start_loc=self.query_start_loc[: ROWS + 1],
            seq_lens=self.seq_lens[:ROWS],
            positions=self.positions[:ROWS],
            block_table=self.table[:ROWS, :PAGES],
            slot_mapping=self.slot_mapping[:ROWS],
        )


def builder_of(name):
    backend = flashinfer_stand_in.backend(name) if name == "flashinfer" else get(name)
    spec = make_spec(page_size=PAGE, **SPECS[name])
    return backend.builder(spec, CPU, max_reqs=ROWS, max_tokens=ROWS, max_seq_len=PAGES * PAGE)


def tensors_of(batch):
    return {name: value for name, value in values_of(batch).items() if torch.is_tensor(value)}


@pytest.mark.parametrize("name", SPECS)
def test_captured_advance_follows_engine_tensors(name):
    """An engine moves its lengths itself, and may refresh twice in one step."""
    with flashinfer_stand_in.installed():
        engine, builder = Engine(), builder_of(name)
        engine.fill([1, 1, 1], seed=1)  # as for a capture: lengths that no batch will have
        check_batch(engine.batch(), CPU)
        metadata = builder.build(engine.batch())
        graph = runtime_for(CPU).capture(lambda: builder.advance(metadata))
        for seed, lens in ((2, [40, 17, 96]), (3, [5, 80, 33])):
            engine.fill(lens, seed)
            before = {field: value.clone() for field, value in tensors_of(engine.batch()).items()}
            graph.replay()
            graph.replay()
            assert all(torch.equal(value, before[field]) for field, value in tensors_of(engine.batch()).items())
            found = {field: getattr(metadata, field).clone() for field in builder.step_fields}
            fresh = builder_of(name).build(engine.batch())
            assert all(torch.equal(value, getattr(fresh, field)) for field, value in found.items())
