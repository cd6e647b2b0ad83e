"""Everything that depends on the current CUDA device first makes its tensors' device current; checked without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from attn_backends import get
from builders.devices import on_device
from builders.kernels.op import define_op
from spec_decode.conformance import check
from spec_decode.conformance.check import Family, expand
from spec_decode.engine import Engine
from spec_decode.engine.outputs import AsyncOutput
from spec_decode.graphs.cuda import CudaRuntime
from spec_decode.graphs.cuda_loop import WhileGraph
from spec_decode.paged import GraphMode
from spec_decode.testing.subject import Subject
from tests.factories import engine_config, make_pair
from tests.spec_decode.drafter.drafter_fixture import advancing

SECOND = torch.device("cuda", 1)


class FakeCuda:
    """Which device is current, as torch.cuda would say."""

    current = 0

    @contextmanager
    def device(self, device: torch.device | int) -> Iterator[None]:
        before, self.current = self.current, device if isinstance(device, int) else device.index
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    return fake


def test_on_device_restores_current_device(cuda: FakeCuda) -> None:
    with on_device(SECOND):
        assert cuda.current == 1
    assert cuda.current == 0


def test_on_device_skips_cuda_for_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("CUDA was asked"))
    with on_device(torch.device("cpu")):
        pass


def test_op_launches_on_device_of_first_tensor(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    class LaunchSomewhere(NamedTuple):
        count: int
        tensor: torch.Tensor

        def reference(self) -> None: ...

        def launch(self) -> None:
            launched.append(cuda.current)

    kernels: dict[str, Any] = {}
    monkeypatch.setattr(torch.library, "impl", lambda name, kind, kernel: kernels.update({kind: kernel}))
    define_op("tests::launch_somewhere", LaunchSomewhere)
    for index in (0, 1):
        kernels["cuda"](7, SimpleNamespace(get_device=lambda index=index: index))
    assert launched == [0, 1] and cuda.current == 0


def test_drafter_round_runs_on_its_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = advancing()
    seen: list[int] = []
    forward = fixture.model.forward
    monkeypatch.setattr(fixture.model, "forward", lambda *inputs: seen.append(cuda.current) or forward(*inputs))
    fixture.drafter.device = SECOND
    fixture.rounds(1)
    assert {*seen} == {1} and cuda.current == 0


def test_kit_check_runs_on_given_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(check, "_definitions", [])
    Family("contract", covers=lambda subject, case: [])("a check")(lambda subject, case: seen.append(cuda.current))
    (found,) = expand(Subject(get("torch_reference"), SECOND))
    found()
    assert seen == [1]


def test_engine_step_runs_on_its_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = make_pair()
    config = engine_config(
        num_speculative_tokens=0, max_num_seqs=1, max_model_len=32, page_size=4, graph_mode=GraphMode.NONE
    )
    engine = Engine(target, draft, get("torch_reference"), config)
    engine.capture()
    seen: list[int] = []
    monkeypatch.setattr(engine, "_step", lambda: seen.append(cuda.current))
    engine.device = SECOND
    engine.step()
    assert seen == [1]


def test_host_copy_is_recorded_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=recorded.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream of", device))
    source: Any = SimpleNamespace(is_cuda=True, device=SECOND, to=lambda *where, **how: torch.zeros(1, 1))
    AsyncOutput(source)
    assert recorded == [("stream of", SECOND)]


def test_capture_runs_on_device_of_its_runtime(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    graph = SimpleNamespace(replay=None, capture_begin=lambda **options: None, capture_end=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    seen: list[int] = []
    CudaRuntime(SECOND).capture(lambda: seen.append(cuda.current))
    assert seen == [1]


def test_loop_graph_launches_on_its_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=device.index))
    seen: list[tuple[int, int]] = []
    loop = object.__new__(WhileGraph)
    loop._device, loop._executable = SECOND, None
    loop._launch = lambda executable, stream: seen.append((cuda.current, stream)) or (0,)
    loop.replay()
    assert seen == [(1, 1)]
