"""That the checks of SGLang's recurrent states find faults of its metadata and of its commit.

Needs SGLang's Python, which `make engines` unpacks, and TRITON_INTERPRET=1 for SGLang's own Triton kernels.
"""

from __future__ import annotations

import os
from functools import cache

import pytest

from tests.engines.released import needs

pytestmark = [
    needs("sglang", "0.5.23"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="SGLang's kernels need TRITON_INTERPRET=1 here"
    ),
    pytest.mark.parametrize("name", ["GDNAttnBackend", "Mamba2AttnBackend"]),
]


@cache
def backend_of(name):
    from engine_kits.sglang import subjects

    return subjects([name])[0].backend


def verdict_of(name, change, play="no_drafts-graph"):
    """Serve the traffic of a play with an engine around the backend, after a change to it."""
    from engine_kits.state_traffic import serve

    backend = backend_of(name)
    runner = type(backend).engine("graph")
    change(runner)
    return serve(runner, backend.plays[play].traffic)


def commit_to_another_size(runner):
    """Commit with the slots of the largest graph."""
    accept = runner.accept

    def stale(steps, kept):
        runner.backend.forward_metadata = runner.captured[8, 5]
        accept(steps, kept)

    runner.accept = stale


def commit_the_count(runner):
    """Commit the state after as many drafts as were accepted, where its index is asked for."""
    accept = runner.accept
    runner.accept = lambda steps, kept: accept(steps, [min(drafts + 1, 4) for drafts in kept])


def keep_slots_of_capture(runner):
    """Leave a graph's slots as they were at its capture."""
    replay = runner.backend._replay_metadata

    def forget(rows, *args, **given):
        held = runner.backend.state_indices_list[rows - 1]
        before = held.clone()
        metadata = replay(rows, *args, **given)
        held.copy_(before)
        return metadata

    runner.backend._replay_metadata = forget


def leave_padding_unmarked(runner):
    """Count rows of padding as rows of requests."""
    replay = runner.backend._replay_metadata
    runner.backend._replay_metadata = lambda *args, **given: replay(*args, **{**given, "num_padding": 0})


@pytest.mark.parametrize("change", [commit_to_another_size, commit_the_count, keep_slots_of_capture])
def test_wrong_states_are_found(name, change):
    assert verdict_of(name, change).wrong


def test_padding_in_slots_of_others_is_found(name):
    assert verdict_of(name, leave_padding_unmarked).foreign


def test_released_states_are_right(name):
    verdict = verdict_of(name, lambda runner: None)
    assert verdict.states and not (verdict.wrong or verdict.foreign or verdict.moved)
