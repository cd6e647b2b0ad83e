"""Validation of draft metadata in a served vLLM: ATTN_BACKENDS_VALIDATE=1, for drafts that run as one full graph.

If the metadata that a graph replays goes stale, the only sign is a lower acceptance rate. After some of the rounds, the
tensors that the draft's graph read in its last step are compared with those that a second set of vLLM's own builders
builds for the same batch, and the captured buffers with those that vLLM fills now. The first difference is logged with
its group, step and field, and ends the comparison.

Here are the hooks in vLLM's speculators, which tell a `RoundRecorder` what happens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from attn_backends.engines.vllm import hooks
from attn_backends.engines.vllm.compat import (
    CUDAGraphMode,
    DFlashSpeculator,
    DraftModelSpeculator,
    TargetDependentARSpeculator,
    init_logger,
)
from attn_backends.engines.vllm.differences import Round
from attn_backends.engines.vllm.hooks import Read, Run
from attn_backends.engines.vllm.recorder import RoundRecorder

_log = init_logger("vllm.attn_backends")


recorder_of = partial(hooks.kept_recorder, RoundRecorder)


def install() -> None:
    """Wrap vLLM's speculators, once. Raises UnsupportedVllm if one is not vLLM's own."""
    hooks.install(_HOOKS, "speculators", recorder_of)
    hooks.wrap(DraftModelSpeculator, "set_attn", _set_attn, recorder_of)


def _set_attn(recorder: RoundRecorder, run: Run, read: Read) -> Any:
    result = run()
    if reason := _why_not_compared(recorder.speculator):
        _log.warning(reason)
    return result


def _why_not_compared(speculator: Any) -> str:
    """Return why no round of a speculator is compared; empty if rounds are."""
    watched: Any = tuple(_HOOKS)
    if not isinstance(speculator, watched):
        return f"Draft metadata of {type(speculator).__name__} is not compared: it drafts in its own way."
    if not speculator.supports_decode_metadata_update:
        return "No draft metadata is compared: vLLM rebuilds it for every step."
    if speculator.vllm_config.compilation_config.cudagraph_mode is CUDAGraphMode.NONE:  # `capture` is not called
        return "No draft metadata is compared: CUDA graphs are off."
    return ""


def _capture(recorder: RoundRecorder, run: Run, read: Read) -> Any:
    with recorder.capturing():
        return run()


# A draft that goes step by step: one call replays the graph of a round's later steps.


def _forward_of_steps(recorder: RoundRecorder, run: Run, read: Read) -> Any:
    recorder.keep(lambda: ((read().num_tokens_padded, read().num_speculative_steps), read().attn_metadata))
    return run()


def _replay_of_steps(recorder: RoundRecorder, run: Run, read: Read) -> Any:
    with recorder.round():
        recorder.graph(lambda: _round_of_steps(read()))
        return run()


def _round_of_steps(call: Any) -> Round | None:
    if (desc := call.batch_desc).cg_mode != CUDAGraphMode.FULL:
        return None
    # A graph without a fixed number of steps runs them all.
    steps = getattr(desc, "num_speculative_tokens", call.self.num_speculative_steps)
    padded = desc.num_reqs or desc.num_tokens
    return Round((desc.num_tokens, steps), call.num_reqs, padded, 1, steps - 1, call.seq_lens_cpu_upper_bound)


# A draft of a whole block: `propose` decides whether to replay a graph.


def _forward_of_block(recorder: RoundRecorder, run: Run, read: Read) -> Any:
    recorder.keep(lambda: ((read().num_reqs, 0), read().attn_metadata))
    return run()


def _propose_block(recorder: RoundRecorder, run: Run, read: Read) -> Any:
    with recorder.round():
        return run()


def _replay_of_block(recorder: RoundRecorder, run: Run, read: Read) -> Any:
    recorder.graph(lambda: _round_of_block(read()))
    return run()


def _round_of_block(call: Any) -> Round | None:
    if call.dummy_run:
        return None
    batch, padded, query_len = call.input_batch, call.num_graph_reqs, call.self.num_query_per_req
    return Round((padded, 0), batch.num_reqs, padded, query_len, 0, batch.seq_lens_cpu_upper_bound)


_HOOKS: hooks.Hooks = {
    TargetDependentARSpeculator: {
        "capture": (_capture, ""),
        "_generate_fused_drafts": (_forward_of_steps, "num_tokens_padded attn_metadata num_speculative_steps"),
        "_fused_multi_step_decode": (_replay_of_steps, "num_reqs batch_desc seq_lens_cpu_upper_bound"),
    },
    DFlashSpeculator: {
        "capture": (_capture, ""),
        "_prepare_graph_forward": (_forward_of_block, "num_reqs attn_metadata"),
        "_prepare_graph_replay": (_replay_of_block, "input_batch num_graph_reqs dummy_run"),
        "propose": (_propose_block, ""),
    },
}
