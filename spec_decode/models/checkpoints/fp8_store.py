"""Checkpoints whose weights are stored in FP8 with scales beside them.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from attn_backends.kernels.linear.fp8_weight import DTYPE, Fp8Weight
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError, is_finite, wider
from spec_decode.models.checkpoints.folder_kind import read_config
from spec_decode.models.checkpoints.fp8_layout import FIELD, Fp8Layout, read_fp8_layout
from spec_decode.models.checkpoints.kv_scales import SCHEME, LayerScales
from spec_decode.models.checkpoints.store import TensorStore

_SCALES = ("_scale", "_scale_inv")
"""What the name of a scale adds to its weight's."""
_ROUNDING = ("input_scale", "activation_scale")
"""Scales for rounding activations, which are left out: few rows stay in 16 bits, and of many each gets its own."""


class _Scale(NamedTuple):
    """Where a weight's scale is, and whether each block has one."""

    name: str
    blocked: bool


class Fp8Store(TensorStore):
    """Takes weights with a scale for each output, or one for all, as they are, if `keeps`, and widens all others. The
    names of scales are hidden: they belong to their weights."""

    layout: Fp8Layout
    _scales: dict[str, _Scale]
    _hidden: frozenset[str]
    keeps = True
    """Whether the model's products read 8-bit weights."""

    @classmethod
    def open(cls, folder: Path) -> TensorStore:
        """As TensorStore.open: an Fp8Store if config.json describes FP8 weights, else a TensorStore. Reads the sizes of
        all tensors, and the scales. Raises CheckpointError for those that do not fit each other."""
        config = read_config(folder)
        layout = read_fp8_layout(ConfigReader(config, str(folder / "config.json")))
        if layout is None:
            return TensorStore.of(folder, config)
        store = cls.of(folder, config)
        store.layout = layout
        fields = {name: value for name, value in store.config.values.items() if name != FIELD}
        store.config = ConfigReader(fields, store.config.place)
        store._scales = dict(store._paired())
        store._hidden = frozenset().union(*map(store._beside, store._scales))
        return store

    def kv_scales(self, layers: Collection[int]) -> LayerScales:
        """As TensorStore.kv_scales. Raises CheckpointError also if config.json says that there are some and there are
        none."""
        found = super().kv_scales(layers)
        if self.layout.caches and not found:
            raise CheckpointError(
                f"{self.folder} has {SCHEME} in its config.json, but no k_scale and v_scale of any layer. Complete the "
                f"download, or remove {SCHEME}."
            )
        return found

    @property
    def is_blocked(self) -> bool:
        """Whether some weights have a scale for each block, and so cannot stay as they are."""
        return any(scale.blocked for scale in self._scales.values())

    def names(self) -> frozenset[str]:
        """Return the names of all tensors but the scales."""
        return super().names() - self._hidden

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """As TensorStore.take; FP8 weights are widened on the device, to fp32 without a dtype. Raises CheckpointError,
        also for numbers too large for the dtype."""
        if name not in self._scales:
            return super().take(name, shape, dtype, device)
        values, scale = self._take_parts(name, shape, device)
        if self._scales[name].blocked:
            rows, columns = self.layout.block
            out = torch.empty(shape, dtype=dtype or torch.float32, device=device)
            for into, part, row in zip(out.split(rows), values.split(rows), scale, strict=True):
                into.copy_(part.float() * row.repeat_interleave(columns)[: shape[1]])
        else:
            out = Fp8Weight(values, scale).widened(dtype or torch.float32)
        if not is_finite(out):
            raise CheckpointError(f"{self._at(name)} has numbers too large for {out.dtype}. {wider(out.dtype)}")
        return out

    def take_into(self, name: str, out: torch.Tensor) -> None:
        """As TensorStore.take_into; an FP8 weight is widened beside `out` first."""
        if name in self._scales:
            out.copy_(self.take(name, tuple(out.shape), out.dtype, out.device))
        else:
            super().take_into(name, out)

    def _stored(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        return super()._stored(name, shape, DTYPE if name in self._scales else dtype)

    def take_fp8(self, name: str, shape: tuple[int, ...], device: torch.device) -> Fp8Weight | None:
        """As TensorStore.take_fp8."""
        if not self.keeps or name not in self._scales or self._scales[name].blocked:
            return None
        return Fp8Weight(*self._take_parts(name, shape, device))

    def _take_parts(
        self, name: str, shape: tuple[int, ...], device: torch.device | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values, and the scale: fp32 [N], or of the blocks."""
        values = super().take(name, shape, DTYPE, device)
        if bool((values.view(torch.uint8) & 0x7F).eq(0x7F).any()):
            raise CheckpointError(f"{self._at(name)} must hold numbers, got NaN. Restore the file.")
        self._taken |= self._beside(name)
        scale = self.peek(self._scales[name].name).float()
        if not self._scales[name].blocked:
            scale = scale.flatten().expand(shape[0]).contiguous()
        scale = scale.to(values.device, copy=True)
        for each in self._beside(name):
            self._close_finished(each)
        return values, scale

    def _beside(self, name: str) -> set[str]:
        """Return the names of a weight's scales."""
        module = name.removesuffix("weight")
        return {self._scales[name].name, *(module + each for each in _ROUNDING)}

    def _at(self, name: str) -> str:
        return f"{name} in {self._files[name]}"

    def _paired(self) -> Iterator[tuple[str, _Scale]]:
        """Yield each FP8 weight with its scale. Raises CheckpointError for tensors that contradict each other or the
        config."""
        for name in sorted(self._files):
            stored, (module, _, kind) = self.peek(name), name.rpartition(".")
            narrow, should = stored.dtype == DTYPE, self.layout.quantises(module)
            # transformers leaves the head out without saying so.
            linear = module.endswith("_proj") or (module == "lm_head" and self.layout.method != "fp8")
            weight = next((name.removesuffix(end) for end in _SCALES if name.endswith(f".weight{end}")), None)
            if stored.itemsize == 1 and not (narrow and kind == "weight" and stored.dim() == 2):
                wrong = f"has {stored.dtype} {list(stored.shape)}; 8 bits are read as {DTYPE} [N, K]. Use a bf16 copy."
            elif narrow and not should:
                wrong = f"is in FP8, and config.json says that {module} is not. Restore config.json."
            elif kind == "weight" and linear and should and not narrow:
                wrong = f"has {stored.dtype}, and config.json says FP8. Let it ignore {module}, or restore the file."
            elif weight is not None and (weight not in self._files or self.peek(weight).dtype != DTYPE):
                wrong = f"is a scale without an FP8 {weight}. Restore the file."
            else:
                wrong = ""
            if wrong:
                raise CheckpointError(f"{self._at(name)} {wrong}")
            if narrow:
                yield name, self._find_scale(name, stored)

    def _find_scale(self, weight: str, stored: torch.Tensor) -> _Scale:
        found = [weight + end for end in _SCALES if weight + end in self._files]
        if len(found) != 1:
            raise CheckpointError(
                f"{self._at(weight)} must have one scale, {weight + _SCALES[0]} or {weight + _SCALES[1]}, got "
                f"{len(found)}. Complete the download, or restore the file."
            )
        scale, rows = self.peek(found[0]), len(stored)
        blocks = [-(-size // block) for size, block in zip(stored.shape, self.layout.block, strict=True)]
        shapes = {"tensor": ([], [1]), "channel": ([rows, 1], [rows]), "block": (blocks,)}
        kinds = [kind for kind in sorted(self.layout.strategies) if list(scale.shape) in shapes[kind]]
        if not kinds or not scale.is_floating_point() or scale.itemsize < 2:
            wanted = " or ".join(str(shape) for kind in sorted(self.layout.strategies) for shape in shapes[kind])
            raise CheckpointError(
                f"{self._at(found[0])} must be floats of 16 bits or more, {wanted} for {list(stored.shape)}, "
                f"got {scale.dtype} {list(scale.shape)}. Use weights and config.json from the same model."
            )
        if len(wrong := scale[~((scale > 0) & scale.isfinite())]):
            raise CheckpointError(
                f"{self._at(found[0])} must be positive and finite, got {wrong[0]}. Restore the file."
            )
        return _Scale(found[0], kinds[0] == "block")
