"""The draft loop of vLLM's speculator for multi-token prediction, over the groups of a runner of these tests.

See vllm_runner.py for what it needs.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from spec_decode.graphs import runtime_for
from tests.engines.vllm_runner import HEADS, TOKENS, WIDTH, Tables
from tests.factories import CPU

LENS = ([5, 150, 33, 16, 90, 7, 12, 64], [40, 6, 188])


class DraftLoop:
    """Steps 1 to K-1 of multi-token prediction by vLLM's own speculator: captured once over a dummy batch, replayed."""

    @torch.inference_mode()
    def __init__(self, runner):
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
        from vllm.v1.worker.gpu.input_batch import InputBuffers
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState
        from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

        self.runner, rows = runner, runner.ROWS
        self.inputs = InputBuffers(rows, rows, CPU)
        runner.seq_lens, runner.starts = self.inputs.seq_lens, self.inputs.query_start_loc
        self.query = torch.zeros(rows, HEADS, runner.head_dim, dtype=torch.bfloat16)
        self.outs = torch.zeros(TOKENS, rows, HEADS, runner.value_dim, dtype=torch.bfloat16)
        self.speculator = object.__new__(MTPSpeculator)
        self.max_model_len = runner.config.model_config.max_model_len
        layers = [layer for group in runner.groups for layer in group.layer_names]
        ids = torch.zeros(rows, dtype=torch.int64)
        vars(self.speculator).update(
            vllm_config=runner.config, device=CPU, attn_groups=[runner.groups], block_tables=Tables(runner),
            input_buffers=self.inputs, num_speculative_steps=TOKENS, max_model_len=self.max_model_len,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=layers)]),
            idx_mapping=torch.arange(rows), current_draft_step=torch.zeros(1, dtype=torch.int64),
            sample_src_positions=ids.clone(), draft_tokens=torch.zeros(rows, TOKENS, dtype=torch.int64),
            hidden_states=torch.zeros(rows, 1), temperature=None, seeds=None, draft_logits=None,
            pcp_manager=None, supports_mm_inputs=False, model=self.model, sample_draft=lambda *given: ids,
            _prepare_eplb_forward=lambda rows: None,
        )  # fmt: skip
        self.speculator._configure_decode_metadata_update()
        state = object.__new__(DefaultModelState)
        vars(state).update(supports_mm_inputs=False, encoder_cache=None, model_config=runner.config.model_config)
        groups = self.speculator.attn_groups, self.speculator.kv_cache_config

        def forward():
            """vLLM prepares and warms up with what the capture then has anew."""
            tables = self.speculator.block_tables
            made = prepare_inputs_to_capture(rows, rows, state, self.inputs, tables, *groups, True, 1)
            self.metadata, self.step = made.attn_metadata, 0
            how = None, CUDAGraphMode.FULL, TOKENS
            return lambda: self.speculator._generate_fused_drafts(rows, rows, *made, *how)

        forward()()
        self.graph = runtime_for(CPU).capture(forward())

    def model(self, **inputs):
        """The draft's one layer, of which only the attention is looked at."""
        self.step += 1
        self.outs[self.step].copy_(self.runner.draft(self.metadata, self.query))
        return self.speculator.hidden_states

    def draft(self, lens, seed):
        """For requests of which one token was rejected, and whose first drafted token is the last of `lens` tokens."""
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_decode_inputs

        runner, rows = self.runner, len(lens)
        runner.table.zero_()
        pages = torch.randperm(99, generator=torch.Generator().manual_seed(seed)).int() + 1
        runner.table[:rows, :WIDTH] = pages[: rows * WIDTH].view(-1, WIDTH)
        self.query.copy_(torch.randn(self.query.shape, generator=torch.Generator().manual_seed(seed)))
        sampled, rejected = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int32)
        prepare_decode_inputs(
            sampled, torch.tensor(lens, dtype=torch.int32), rejected, self.inputs,
            self.speculator.sample_src_positions, self.max_model_len, runner.ROWS,
        )  # fmt: skip
        assert runner.seq_lens.tolist() == [*lens, *[0] * (runner.ROWS - rows)]
        self.graph.replay()

    @torch.inference_mode()
    def assert_right(self):
        for seed, lens in enumerate(LENS):
            self.draft(lens, seed)
            for step in range(1, TOKENS):
                truth = self.runner.truth(self.query, [length + step - 1 for length in lens])
                torch.testing.assert_close(self.outs[step, : len(lens)].double(), truth, atol=2e-2, rtol=2e-2)
