"""The draft loop of vLLM's multi-token-prediction speculator, over the groups of a test runner.

See vllm_runner.py for what it needs.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from spec_decode.graphs import runtime_for
from tests.engines.vllm_flashinfer import HOST_PLANS
from tests.engines.vllm_runner import HEADS, TOKENS, WIDTH, Tables
from tests.factories import CPU

LENS = ([5, 150, 33, 16, 90, 7, 12, 64], [40, 6, 188])


def speculator_of(cls, runner, **state):
    """Return a vLLM speculator over a runner's groups; the runner then reads the speculator's inputs."""
    from vllm.v1.worker.gpu.input_batch import InputBuffers

    rows, layers = runner.ROWS, [layer for group in runner.groups for layer in group.layer_names]
    inputs = runner.inputs = InputBuffers(rows, rows * runner.query_len, CPU)
    runner.seq_lens, runner.starts, runner.positions = inputs.seq_lens, inputs.query_start_loc, inputs.positions
    speculator = object.__new__(cls)
    defaults = {
        "vllm_config": runner.config, "device": CPU, "attn_groups": [runner.groups], "block_tables": Tables(runner),
        "input_buffers": inputs, "num_speculative_steps": TOKENS, "max_num_reqs": rows, "dcp_size": 1,
        "max_model_len": runner.config.model_config.max_model_len, "draft_max_seq_len": WIDTH * runner.page,
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=layers)]),
        "idx_mapping": torch.full((rows,), -1), "arange_np": np.arange(rows + 1, dtype=np.int32),
        "draft_is_prefilling": torch.zeros(rows, dtype=torch.bool),
    }  # fmt: skip
    vars(speculator).update({**defaults, **state})
    speculator._configure_decode_metadata_update()
    return speculator


class DraftLoop:
    """Steps 1 to K-1 of multi-token prediction by vLLM's own speculator: captured once over a dummy batch, replayed.

    attends: whether the draft's only layer attends; outs has its output in each step.
    """

    def __init__(self, runner, *, attends=True):
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState
        from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

        self.runner, self.attends, rows = runner, attends, runner.ROWS
        self.query = torch.zeros(rows, HEADS, runner.head_dim, dtype=torch.bfloat16)
        self.outs = torch.zeros(TOKENS, rows, HEADS, runner.value_dim, dtype=torch.bfloat16)
        self.desc = SimpleNamespace(num_tokens=rows, num_reqs=rows, cg_mode=CUDAGraphMode.FULL)
        state, ids = object.__new__(DefaultModelState), torch.zeros(rows, dtype=torch.int64)
        vars(state).update(supports_mm_inputs=False, encoder_cache=None, model_config=runner.config.model_config)
        self.speculator = speculator_of(
            MTPSpeculator, runner, model_state=state, model=self.model, sample_draft=lambda *given: ids,
            supports_mm_inputs=False, current_draft_step=torch.zeros(1, dtype=torch.int64),
            sample_src_positions=ids.clone(), last_token_indices=ids.clone(),
            draft_tokens=torch.zeros(rows, TOKENS, dtype=torch.int64),
            hidden_states=torch.zeros(rows, 1), temperature=None, seeds=None, draft_logits=None, pcp_manager=None,
            target_input_buffers=None, target_attn_groups=None, _prepare_eplb_forward=lambda rows: None,
            speculative_config=SimpleNamespace(uses_dynamic_speculative_decoding=lambda: False),
            prefill_cudagraph_manager=SimpleNamespace(use_breakable_cg=False, capture=lambda *given, **more: None),
            decode_cudagraph_manager=SimpleNamespace(
                capture=self.capture, run_fullgraph=lambda desc: self.graph.replay()
            ),
        )  # fmt: skip
        self.speculator.capture()

    def capture(self, generate, *given, **more):
        """vLLM prepares and warms up with what the capture then has anew."""
        from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

        rows = self.runner.ROWS

        def forward():
            prepared = prepare_inputs_to_capture(rows, rows, *given, True, 1)
            self.metadata, self.step = prepared.attn_metadata, 0
            return lambda: generate(rows, rows, *prepared, None, self.desc.cg_mode, TOKENS)

        forward()()
        self.graph = runtime_for(CPU).capture(forward())

    def model(self, **inputs):
        """The draft's only layer; just its attention is examined."""
        self.step += 1
        if self.attends:
            self.outs[self.step].copy_(self.runner.draft(self.metadata, self.query))
        return self.speculator.hidden_states

    def draft(self, lens, seed=0, *, dummy=False):
        """Draft for requests with one rejected token, whose first drafted token is the last of `lens` tokens.

        dummy: for no requests at all, as in vLLM's warm-up.
        """
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_decode_inputs

        runner, speculator, rows = self.runner, self.speculator, len(lens)
        runner.table.zero_()
        runner.fill(lens, seed)
        runner.starts.copy_(torch.arange(runner.ROWS + 1).clamp(max=rows))
        speculator.idx_mapping.fill_(-1)
        if not dummy:
            speculator.idx_mapping[:rows] = torch.arange(rows)
        self.query.copy_(torch.randn(self.query.shape, generator=torch.Generator().manual_seed(seed)))
        sampled, rejected = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int32)
        bound = torch.tensor(lens, dtype=torch.int32)
        runner.positions[:rows] = bound - 2
        prepare_decode_inputs(
            sampled, bound, rejected, runner.inputs, speculator.sample_src_positions, speculator.max_model_len,
            runner.ROWS,
        )  # fmt: skip
        assert runner.seq_lens.tolist() == [*lens, *[0] * (runner.ROWS - rows)]
        speculator._fused_multi_step_decode(rows, False, self.desc, None, bound, TOKENS)

    def assert_right(self):
        """Each step of each batch attends correctly, and nothing is planned on the host."""
        planned = len(HOST_PLANS)
        for seed, lens in enumerate(LENS):
            self.draft(lens, seed)
            for step in range(1, TOKENS):
                truth = self.runner.truth(self.query, [length + step - 1 for length in lens])
                torch.testing.assert_close(self.outs[step, : len(lens)].double(), truth, atol=2e-2, rtol=2e-2)
        assert len(HOST_PLANS) == planned
