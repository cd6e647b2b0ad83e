"""A served vLLM that checks the recurrent states of its hybrid target, in the traffic that the kit draws.

See test_vllm_recurrent_states.py for what it needs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.engines import test_vllm_recurrent_states as states
from tests.engines.test_vllm_recurrent_states import BY_ORDER, GATED, backend_of

pytestmark = states.pytestmark


@pytest.fixture
def validator(monkeypatch, vllm_inside):
    """The validator in vLLM's model state; afterwards it is as it was. It is always time to compare."""
    from attn_backends.engines.vllm import pace, state_validator
    from attn_backends.engines.vllm.compat import MambaHybridModelState

    for name in state_validator._HOOKS[MambaHybridModelState]:
        monkeypatch.setattr(MambaHybridModelState, name, getattr(MambaHybridModelState, name))
    monkeypatch.setattr(pace, "SHARE", float("inf"))
    state_validator.install()
    state_validator.install()
    return state_validator


def recorder_after(validator, name, play, change=lambda runner: None):
    """Serve a play's traffic with vLLM's builder after a change; return what the validator recorded."""
    from engine_kits.state_traffic import serve

    backend = backend_of(name)
    runner = type(backend).engine(backend.plays[play].graphs)
    change(runner)
    serve(runner, backend.plays[play].traffic)
    return validator.recorder_of(runner.model_state)


@pytest.mark.parametrize("play", ["verify-v2_graph", "mixed-v2_graph", "no_drafts-v2_graph", "elsewhere-v2_graph"])
@pytest.mark.parametrize("name", [*GATED, *BY_ORDER])
def test_released_vllm_has_no_difference(name, play, validator):
    recorder = recorder_after(validator, name, play)
    assert recorder.found is None and recorder.rounds > 9


@pytest.mark.parametrize("name", [*GATED, *BY_ORDER])
def test_batches_without_requests_are_not_compared(name, validator):
    def count_of_another_run(runner):
        runner.model_state.num_accepted_tokens_gpu.fill_(3)
        for _ in range(3):
            runner.warm_up(2)

    recorder = recorder_after(validator, name, "verify-v2_graph", count_of_another_run)
    assert recorder.found is None and recorder.rounds > 9


def keep_count_of_last_owner(runner):
    """Leave a row's accepted count to its next owner, as before vllm#48132."""
    add, counts = runner.model_state.add_request, runner.model_state.num_accepted_tokens_gpu

    def added(index, request):
        before = counts[index].clone()
        add(index, request)
        counts[index] = before

    runner.model_state.add_request = added


def count_drafts_alone(runner):
    """Count accepted drafts without the target's own token."""
    accept = runner.accept

    def accepted(steps, kept):
        accept(steps, kept)
        counts = runner.model_state.num_accepted_tokens_gpu
        for step in steps:
            counts[runner.indices[step.request]] = (counts[runner.indices[step.request]] - 1).clamp(min=1)

    runner.accept = accepted


def share_a_block(runner):
    """Let all requests have one block for their last draft."""
    admit = runner.admit

    def admitted(request):
        admit(request)
        runner._blocks[request][-1] = 1

    runner.admit = admitted


def free_a_block(runner):
    """Take a block from each request while it runs, as a block manager might that ends its window early."""
    admit = runner.admit

    def admitted(request):
        admit(request)
        runner._blocks[request][1] = 0

    runner.admit = admitted


def copy_count(runner):
    """Build the counts of all rows of another request's."""
    builder = runner.group.get_metadata_builder(0)
    build = builder.build

    def copied(*args, num_accepted_tokens=None, **rest):
        counts = num_accepted_tokens
        return build(*args, num_accepted_tokens=counts if counts is None else counts.flip(0), **rest)

    builder.build = copied


@pytest.mark.parametrize("name", ["GDNAttentionMetadataBuilder", "Mamba2AttentionMetadataBuilder"])
@pytest.mark.parametrize(
    ("change", "play", "field", "what"),
    [
        (keep_count_of_last_owner, "elsewhere-v2_graph", "num_accepted_tokens", "and the request has 1 more"),
        (count_drafts_alone, "verify-v2_graph", "num_accepted_tokens", "more tokens than before its last step"),
        (copy_count, "verify-v2_graph", "num_accepted_tokens", "more tokens than before its last step"),
        (share_a_block, "verify-v2_graph", "state_indices", "is block 1, which another row has too"),
        (free_a_block, "verify-v2_graph", "state_indices", "is the null block, in a live row"),
        (
            lambda runner: None,
            "shaped_prompts-v1_graph",
            "",
            "a graph reads the captured tensor, not this",
        ),
    ],
    ids=["last owner's count", "drafts alone", "another row's count", "shared block", "freed block", "V1's graph"],
)
def test_fault_is_found(name, change, play, field, what, validator):
    recorder = recorder_after(validator, name, play, change)
    assert field in recorder.found.field and what in recorder.found.what


def test_comparison_takes_a_share_of_the_time(validator, monkeypatch):
    from attn_backends.engines.vllm import pace

    monkeypatch.setattr(pace, "SHARE", 1e-9)
    recorder = recorder_after(validator, "GDNAttentionMetadataBuilder", "verify-v2_graph")
    assert recorder.rounds == 1 and recorder.pace.seconds > 0


def test_states_that_move_between_blocks_are_not_compared(validator, monkeypatch):
    warnings = []
    monkeypatch.setattr(validator._log, "warning", lambda *args: warnings.append(args[0] % args[1:]))

    cache = SimpleNamespace(mamba_cache_mode="align")
    recorder = validator.StateRecorder(SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache)))
    recorder.built({}, SimpleNamespace(input_batch=None, attn_groups=[[SimpleNamespace(kv_cache_spec=None)]]))
    assert recorder.rounds == 0
    assert warnings == ["The target's recurrent states are not compared: mamba_cache_mode is align."]


def test_changed_model_state_is_refused(validator, monkeypatch):
    from attn_backends.engines.vllm.compat import MambaHybridModelState, UnsupportedVllm

    monkeypatch.setattr(MambaHybridModelState, "prepare_attn", lambda self, batch: None)
    with pytest.raises(UnsupportedVllm, match=r"MambaHybridModelState\.prepare_attn"):
        validator.install()


def test_figures_watch_drafts_and_states(validator):
    from scripts.vllm_worker import MeasuredWorker

    def recorder(rounds, found=None):
        return SimpleNamespace(rounds=rounds, found=found, paused=False, pace=SimpleNamespace(seconds=0.5))

    drafts, states, worker = recorder(7), recorder(4, "a count"), MeasuredWorker()
    worker.model_runner = SimpleNamespace(
        speculator=SimpleNamespace(attn_backends_recorder=drafts), model_state=SimpleNamespace()
    )
    assert worker.compare_drafts(True) == {"rounds": 7, "seconds": 0.5, "found": None}
    worker.model_runner.model_state.attn_backends_recorder = states
    assert worker.compare_drafts(False) == {"rounds": 4, "seconds": 1.0, "found": "a count"}
    assert drafts.paused and states.paused
