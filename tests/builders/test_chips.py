"""What is known of our kernels on a chip: the log line at the first launch, the doctor's table, and the page's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import builders.chips
from attn_backends import registry
from builders.chips import CHIPS, Chip
from builders.kernels.triton_runtime import dependent_launch
from spec_decode.tools.doctor import examine
from spec_decode.tools.specs import SPARSE
from tests.chips import LIMITS
from tests.docs.pages import DOCS

GPU = torch.device("cuda", 0)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tuple[int, int]], None]]:
    """Pretend that the machine's GPU has a compute capability."""
    dependent_launch.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield lambda found: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    dependent_launch.cache_clear()


@pytest.mark.parametrize(
    ("capability", "line"),
    [
        ((8, 6), "our Triton kernels on sm_86: compiled, never run."),
        ((12, 1), "our Triton kernels on sm_121: neither compiled nor run."),
        ((9, 0), None),
    ],
)
def test_first_launch_on_chip_without_reports_logs_one_line(
    on: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], line: str | None
) -> None:
    on(capability)
    logged: list[str] = []
    log = SimpleNamespace(warning=lambda message, *args: logged.append(message % args))
    monkeypatch.setattr(builders.chips, "_log", log)
    for _ in range(2):
        dependent_launch(GPU)
    assert [message.partition(" Run ")[0] for message in logged] == ([line] if line else [])


def test_doctor_and_page_show_every_chip() -> None:
    found = {finding.subject: finding.detail for finding in examine(torch.device("cpu")) if finding.topic == "chips"}
    assert [*found] == [f"{chip.target} ({chip.cards})" for chip in CHIPS]
    for chip, detail in zip(CHIPS, found.values(), strict=True):
        assert detail.startswith(f"our Triton kernels: {chip.evidence}; served by ") and "triton_paged" in detail
    page = (DOCS / "backends.md").read_text(encoding="utf-8")
    for chip in CHIPS:
        assert f"| {chip.target} | {chip.cards} | {chip.evidence} |" in page
    assert [chip.target for chip in CHIPS] == [*LIMITS] and [c.target for c in CHIPS if "reports" in c.evidence] == [
        "sm_90"
    ]


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.target)
def test_fp8_latents_are_refused_where_no_kernel_converts_them(on: Callable[..., None], chip: Chip) -> None:
    on(chip.capability)
    spec = replace(SPARSE, kv_dtype=torch.float8_e4m3fn)
    reasons = [
        reason
        for reason in getattr(registry.get("sparse_swa_mla").supports(spec, GPU), "reasons", ())
        if "fp8" in reason
    ]
    assert reasons == (
        ["an fp8_ds_mla cache needs compute capability (8, 9), the device has " + str(chip.capability)]
        if chip.capability < (8, 9)
        else []
    )
