"""Tiles by chip: those of an H100 and an H200 are the measured ones, and others fit their chip."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from attn_backends.kernels import latent_attention, sparse_attention
from attn_backends.kernels.linear.batch_invariant_linear import tile_of
from builders import devices
from builders.devices import Room, room_of
from tests.chips import LIMITS

HOPPER = Room(132, 232448)
LATENT = {
    (1, 576, 2): (16, 64, 4, 3), (16, 80, 2): (16, 64, 4, 3), (17, 576, 2): (32, 64, 8, 3),
    (32, 576, 2): (32, 64, 8, 3), (33, 576, 2): (64, 64, 8, 2), (512, 576, 2): (64, 64, 8, 2),
    (32, 1024, 2): (32, 32, 8, 3),
    (33, 1024, 2): (64, 16, 8, 2), (512, 576, 4): (16, 16, 8, 2), (1, 1024, 4): (16, 16, 8, 2),
}  # fmt: skip
SPARSE = {
    (1, 64, 2, 128): (16, 128, True, 8, 1), (8, 128, 2, 128): (16, 128, True, 8, 1),
    (64, 64, 2, 128): (32, 128, True, 8, 1), (66, 64, 2, 128): (32, 128, True, 8, 1),
    (67, 64, 2, 128): (64, 128, False, 8, 1), (64, 128, 2, 128): (64, 128, False, 8, 1),
    (8, 64, 2, 640): (64, 32, False, 8, 1), (200, 128, 4, 640): (16, 16, False, 8, 1),
}  # fmt: skip
BATCH_INVARIANT = {
    (1024, 1): (64, 32, 128, 4, 4), (1024, 2): (64, 32, 128, 4, 4), (4096, 2): (64, 64, 128, 4, 3),
    (128256, 1): (128, 128, 64, 8, 3), (128256, 4): (16, 32, 32, 4, 3),
}  # fmt: skip


def test_hopper_has_measured_tiles() -> None:
    assert {sizes: tuple(latent_attention.tile_config(*sizes, HOPPER).values()) for sizes in LATENT} == LATENT
    for fp8 in (False, True):
        found = {sizes: tuple(sparse_attention.tile_config(*sizes, HOPPER, fp8).values()) for sizes in SPARSE}
        assert found == SPARSE
    assert {sizes: tuple(tile_of(*sizes, HOPPER).values()) for sizes in BATCH_INVARIANT} == BATCH_INVARIANT


@pytest.mark.parametrize(
    ("version", "hip", "hopper"), [(9, None, True), (9, "7.0", False), (8, None, False), (10, None, False)]
)
def test_only_hopper_loads_and_multiplies_from_shared_memory(
    monkeypatch: pytest.MonkeyPatch, version: int, hip: str | None, hopper: bool
) -> None:
    class Properties:
        multi_processor_count, shared_memory_per_block_optin, major = 132, 232448, version

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    for function in (devices.num_sms, room_of):
        function.cache_clear()
    try:
        assert room_of(torch.device("cuda", 0)) == Room(132, 232448, tma=hopper, wgmma=hopper)
    finally:
        for function in (devices.num_sms, room_of):
            function.cache_clear()


@pytest.mark.parametrize("target", [target for target in LIMITS if target != "sm_90"])
def test_tiles_of_16_bits_fit_every_chip(target: str) -> None:
    room = Room(LIMITS[target].num_sms, LIMITS[target].shared_memory, tma=False, wgmma=False)
    for rows, dim in product((1, 16, 32, 128), (80, 576)):
        block_m, block_n, _, stages = latent_attention.tile_config(rows, dim, 2, room).values()
        assert 2 * (block_m * (dim + block_n) + (stages - 1) * block_n * dim) <= room.shared_memory
        assert min(block_m, block_n) >= 16
    for outputs in (1024, 4096, 128256):
        block_m, block_n, block_k, _, stages = tile_of(outputs, 2, room).values()
        assert stages >= 2 and 2 * stages * (block_m + block_n) * block_k <= room.shared_memory
