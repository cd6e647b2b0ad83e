"""The tokens of a round on their way into the texts."""

import gc

import torch

from spec_decode.engine.outputs import EngineStats, PendingOutputs
from spec_decode.engine.request import Handle, RequestState
from tests.factories import make_request


def test_processing_outputs_triggers_no_garbage_collection():
    """A collection that they set off may look through all objects of the process."""
    outputs, stats, collections = PendingOutputs(2), EngineStats(), []
    requests = [RequestState(Handle(make_request([1], max_tokens=9))) for _ in range(1000)]
    outputs.add_step(requests, torch.tensor([[1, 5, 6, 0]]).expand(1000, -1), None)
    thresholds = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        gc.set_threshold(100)
        outputs.process_oldest(stats)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.pop()
    assert collections == [] and stats.new_tokens == 2000
    assert all(request.handle.generation.token_ids == [5, 6] for request in requests)
