"""A step never waits for the device between its first launch and its last.

The device is "meta", whose tensors have no numbers to wait for. Copies between it and the host are those between a GPU
and the host, which wait for all enqueued work unless they are non-blocking.
"""

import copy
import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attn_backends import get
from builders import devices
from tests.factories import make_request
from tests.spec_decode.engine.engine_helpers import PAIR, make_engine

META, CPU = torch.device("meta"), torch.device("cpu")
REFERENCE = type(get("torch_reference"))


class OnMeta(REFERENCE):
    def supports(self, spec, device):
        return super().supports(spec, CPU)


class Waits(TorchDispatchMode):
    """Lists where copies wait, and gives zeros to those that do not."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        places = {each.device.type for each in tensors if each.dim()}
        name, to = func.overloadpacket.__name__, kwargs.get("device")
        if name in ("to", "_to_copy") and to is not None and torch.device(to).type not in places:
            self.expect(kwargs.get("non_blocking"))
            if torch.device(to) == CPU:
                return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        elif len(places) > 1:
            self.expect(name == "copy_" and args[2:] == (True,))
        return func(*args, **kwargs)

    def expect(self, right):
        if not right:
            self.found.append("".join(traceback.format_stack(limit=12)[:-2]))


@pytest.fixture
def waits(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)
    made = torch.tensor

    def tensor(*args, device=None, **options):
        # A copy that no dispatch mode sees.
        if device is not None and torch.device(device) == META:
            mode.expect(False)
        return made(*args, device=device, **options)

    monkeypatch.setattr(torch, "tensor", tensor)
    mode = Waits()
    return mode


def run(mode, steps=3, draft=True):
    target, drafter = (model.to(META) for model in copy.deepcopy(PAIR))
    engine = make_engine((target, drafter if draft else None), backend=OnMeta(), steps=3 if draft else 0)
    for tokens in (9, 5):
        engine.submit(make_request(prompt=[*range(tokens)], max_tokens=40, temperature=0.7, logit_bias={3: 1.0}))
    mode.found.clear()  # what was built may have waited
    with mode:
        for step in range(steps):
            if step == 1:
                engine.submit(make_request(prompt=[*range(7)], max_tokens=9, presence_penalty=0.5))
            engine.step()
    return engine


@pytest.mark.parametrize("draft", [True, False])
def test_steps_with_prompts_do_not_wait(waits, draft):
    engine = run(waits, draft=draft)
    assert engine.stats.rounds == 3 and engine.stats.prefill_tokens == 21
    assert not waits.found, "\n\n".join(waits.found)


def test_copy_that_waits_is_found(waits, monkeypatch):
    def waiting(buffer, values):
        return buffer.copy_(torch.as_tensor(values, dtype=buffer.dtype))

    monkeypatch.setattr(devices.stage_into, "__code__", waiting.__code__)
    with pytest.raises(AssertionError):
        test_steps_with_prompts_do_not_wait(waits, True)
