"""A checkpoint: its tensors by name, those under a common prefix, and a stand-in with random tensors."""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from typing_extensions import Self

from attn_backends.kernels.linear.fp8_weight import Fp8Weight, Weight, joined_rows
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import (
    CheckpointError,
    check_safetensors,
    is_finite,
    read_object,
    shortened,
    unreadable,
    wider,
)
from spec_decode.models.checkpoints.folder_kind import read_config
from spec_decode.models.checkpoints.kv_scales import LayerScales, read_scales, scale_names

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files that can hold the weights; the first that exists is read."""


_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "markov_w1.weight", "markov_w2.weight", "_codebook")
"""Ends of the names of matrices with a row for each token."""


_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


_MAPPED = 1 << 28
"""Bytes read through one map of a file: its pages count as this process's memory until the map is closed."""


class _Shard(Protocol):
    """A file of tensors."""

    @property
    def places(self) -> Mapping[str, int]:
        """The place of each tensor's bytes among all, by name."""

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as stored, in a map of the file."""


class TensorStore:
    """The tensors of a checkpoint by name, read from disk on demand, and its config.json.

    All errors are CheckpointErrors that name the file and the tensor.
    """

    def __init__(self, folder: Path, config: dict[str, Any], files: dict[str, Path]) -> None:
        """files: the file of each tensor."""
        self.folder, self.config = folder, ConfigReader(config, str(folder / "config.json"))
        self._files = files
        self._shards: dict[Path, _Shard] = {}
        self._left: dict[Path, set[str]] = {}
        self._taken: set[str] = set()
        self._given: dict[str, torch.Tensor] = {}
        self._rows: int | None = None
        self.same_tokens = False
        """Whether the checkpoint is known to have its target's tokens, so that sizes differ in padding only."""
        self.on_read: Callable[[int], None] | None = None
        """Called with the bytes of each tensor that was taken."""

    @classmethod
    def open(cls, folder: Path) -> TensorStore:
        """Read config.json and the tensors' names, but not the tensors. Raises CheckpointError."""
        return cls.of(folder, read_config(folder))

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any]) -> Self:
        """As `open`, with the folder's config.json. Raises CheckpointError."""
        store = cls(folder, config, {})
        store._files = tensor_files(weights_file(folder), store._shard)
        return store

    @property
    def architectures(self) -> list[str]:
        """The classes that config.json names; empty unless it holds a list of names."""
        names = self.config.values.get("architectures")
        return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []

    def names(self) -> frozenset[str]:
        """Return the names of all tensors but the scales of an 8-bit KV cache."""
        return (frozenset(self._files) | self._given.keys()) - scale_names(self._files)

    def kv_scales(self, layers: Collection[int]) -> LayerScales:
        """Read the calibrated scales of these layers' 8-bit KV caches, as `read_scales`."""
        names = scale_names(self._files)
        self._taken |= names
        return read_scales(names, self.peek, layers, str(self.folder))

    @property
    def num_bytes(self) -> int:
        """The size of all its files of weights."""
        return sum(path.stat().st_size for path in set(self._files.values()))

    def place(self, name: str) -> tuple[str, int]:
        """Return a key that sorts tensors in the order in which they are stored; a tensor that is absent comes last."""
        path = self._files.get(name)
        shard = None if path is None else self._shard(path)
        if path is None or shard is None or name not in shard.places:
            return chr(sys.maxunicode), 0
        return path.name, shard.places[name]

    def provide(self, name: str, tensor: torch.Tensor) -> None:
        """Let `take` return this tensor under a name that the checkpoint lacks."""
        self._given[name] = tensor

    def fit_rows(self, rows: int) -> None:
        """Let `take` pad vocabulary tensors of this many rows with zeros, or cut them, to the rows that it is asked
        for."""
        self._rows = rows

    def peek(self, name: str) -> torch.Tensor:
        """Return a stored tensor as it is, without marking it as taken. Raises CheckpointError if it is absent."""
        return self._read(name)

    def take_flat(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor [size], which can be stored with leading dims of 1. Raises CheckpointError as `take`."""
        shape = tuple(self._read(name).shape)
        return self.take(name, (1,) * (len(shape) - 1) + (size,), dtype).flatten()

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Return a copy of one tensor on the device, None for the CPU; dtype None keeps the stored dtype. A mapped file
        goes straight to the device.

        Raises CheckpointError for another shape, for a dtype of another kind (integers, 8-bit floats and wider floats
        are not cast to one another), and for NaN and infinities.
        """
        stored = self._stored(name, shape, dtype)
        out = torch.empty(shape, dtype=dtype or stored.dtype, device=device)
        self._copy(name, stored, out)
        return out

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raise CheckpointError as `take` does, but for the tensor's values: they are not read."""
        self._stored(name, shape, dtype)

    def take_into(self, name: str, out: torch.Tensor) -> None:
        """Copy one tensor into `out`, which has its shape. Raises as `take`."""
        self._copy(name, self._stored(name, tuple(out.shape), out.dtype), out)

    def _stored(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        """Return a tensor as it is stored, if it has this shape and can be cast to dtype."""
        stored = self._given[name] if name in self._given else self._fitted(name, self._read(name), shape)
        place = self._files.get(name, self.folder)
        if tuple(stored.shape) != shape:
            raise CheckpointError(
                f"{name} in {place} must be {list(shape)}, got {list(stored.shape)}. "
                "Use weights and config.json from the same model."
            )
        if dtype is not None and (kind := _kind(dtype)) != _kind(stored.dtype):
            raise CheckpointError(
                f"{name} in {place} must be stored as {kind}, got {stored.dtype}. "
                "Use weights and config.json from the same model, or a bf16 copy."
            )
        return stored

    def _copy(self, name: str, stored: torch.Tensor, out: torch.Tensor) -> None:
        # Copied: a mapped file would still be read, and could change, while the model runs.
        out.copy_(stored)
        place = self._files.get(name, self.folder)
        if not is_finite(out):
            if is_finite(stored):
                raise CheckpointError(
                    f"{name} in {place} must fit in {out.dtype}, got a value of "
                    f"{stored.abs().max():g}, which would become infinite. {wider(out.dtype)}"
                )
            raise CheckpointError(f"{name} in {place} must hold finite numbers, got NaN or infinity. Restore the file.")
        self._taken.add(name)
        self._close_finished(name)
        if self.on_read is not None:
            self.on_read(stored.nbytes)

    def _close_finished(self, name: str) -> None:
        """Close the file of a tensor if all of its tensors were taken."""
        path = self._files.get(name)
        if path is None or path not in self._shards:
            return
        left = self._left.setdefault(path, set(self._shards[path].places))
        left.discard(name)
        if not left:
            del self._shards[path]

    def take_fp8(self, name: str, shape: tuple[int, ...], device: torch.device) -> Fp8Weight | None:
        """Return a weight [N, K] that products read as it is stored, in 8 bits; None for any other tensor. Raises
        CheckpointError as `take`."""
        return None

    def refuse_unused(self, *, under: str = "", drafts: range = range(0)) -> None:
        """Raise CheckpointError for tensors under a prefix that were not taken, except the rotary tables that old
        checkpoints keep in every layer, and the layers of these numbers, which are a draft's."""
        unused = {name for name in self._files.keys() - self._taken if _layer_number(name) not in drafts}
        if extra := sorted(x for x in unused if x.startswith(under) and not x.endswith("rotary_emb.inv_freq")):
            raise CheckpointError(
                f"{self.folder} has {len(extra)} unexpected tensors{f' under {under}' if under else ''}: "
                f"{shortened(extra)}; the first is in {self._files[extra[0]].name}. Ignoring them would change the "
                "outputs. Use a model without them, or restore config.json if it is another model's."
            )

    def _fitted(self, name: str, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        rows = stored.shape[0] if stored.dim() else 0
        if rows != self._rows or rows == shape[0] or stored.shape[1:] != shape[1:] or not name.endswith(_VOCABULARY):
            return stored
        return nn.functional.pad(stored[: shape[0]], (0, 0, 0, max(0, shape[0] - rows)))

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise CheckpointError(
                f"{self.folder} lacks the tensor {name}; it has {len(self._files)} tensors. "
                "Use weights and config.json from the same model."
            )
        path = self._files[name]
        shard = self._shard(path)
        if name not in shard.places:
            raise CheckpointError(
                f"the index of {self.folder} maps {name} to {path.name}, which does not contain it. "
                "Download the index and its shards again."
            )
        try:
            return shard.read(name)
        except SafetensorError as error:
            raise unreadable(path, error) from error

    def _shard(self, path: Path) -> _Shard:
        if path not in self._shards:
            self._shards[path] = _open_shard(path)
        return self._shards[path]


def _layer_number(name: str) -> int | None:
    found = _LAYER.match(name)
    return None if found is None else int(found[1])


def _kind(dtype: torch.dtype) -> str:
    if not dtype.is_floating_point:
        return "complex numbers" if dtype.is_complex else "integers"
    return "floats of at least 16 bits" if dtype.itemsize >= 2 else "8-bit floats"


def weights_file(folder: Path) -> Path:
    """Return the first of WEIGHTS that exists in the folder. Raises CheckpointError if there is none."""
    found = next((path for name in WEIGHTS if (path := folder / name).is_file()), None)
    if found is None:
        lacks = f"{folder} has no weights ({', '.join(WEIGHTS[:-1])} or {WEIGHTS[-1]})"
        if files := sorted(folder.glob("*.gguf")):
            raise CheckpointError(f"{lacks}, only {files[0].name}; GGUF is not read. Use the same model in bf16.")
        raise CheckpointError(f"{lacks}. Complete the download.")
    return found


def check_weights(folder: Path) -> None:
    """Raise CheckpointError for a file of weights that is missing or cannot be read, and for a tensor that two files
    hold. Reads only the tensors' names."""
    tensor_files(weights_file(folder), _open_shard)


def tensor_files(weights: Path, opened: Callable[[Path], _Shard]) -> dict[str, Path]:
    """Return the file of each tensor, for a file of weights or an index: also of those tensors that it leaves out.
    Raises CheckpointError, also for a tensor that two files hold."""
    if weights.suffix != ".json":
        return dict.fromkeys(opened(weights).places, weights)
    listed, found = read_index(weights), dict[str, Path]()
    for path in sorted(set(listed.values())):
        places = opened(path).places
        if doubled := next((name for name in places if name in found), None):
            raise CheckpointError(
                f"{doubled} is in both {found[doubled]} and {path.name}; either could be the trained one. Download "
                "the index and its shards again."
            )
        found |= dict.fromkeys(places, path)
    return found | listed


def read_index(index: Path) -> dict[str, Path]:
    """Read the file of each tensor from an index. All shards must exist in its folder, possibly as links. Raises
    CheckpointError."""
    places = read_object(index, "Restore the file.").get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise CheckpointError(
            f"{index} must hold a weight_map from tensor names to file names, got {type(places).__name__}. "
            "Restore the file."
        )
    shards = sorted(set(places.values()))
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise CheckpointError(f"{index} must name files in its folder, got {outside[0]!r}. Restore the file.")
    if missing := [shard[:80] for shard in shards if not _is_file(index.parent / shard)]:
        raise CheckpointError(
            f"{index} names {len(shards)} files, {len(missing)} of them missing: {shortened(missing)}. "
            "Complete the download."
        )
    return {name: index.parent / place for name, place in places.items()}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # an impossible file name
        return False


def _open_shard(path: Path) -> _Shard:
    return _open_bin(path) if path.suffix == ".bin" else _Safetensors(path)


class _Safetensors:
    """A file of safetensors, read through one map after another, so that only few of its pages are in memory."""

    def __init__(self, path: Path) -> None:
        self._path, self._mapped = path, 0
        self._handle: Any = None
        self.places = {name: place for place, name in enumerate(check_safetensors(path))}

    def read(self, name: str) -> torch.Tensor:
        if self._handle is None or self._mapped >= _MAPPED:
            self._handle, self._mapped = safe_open(self._path, framework="pt"), 0
        tensor: torch.Tensor = self._handle.get_tensor(name)
        self._mapped += tensor.nbytes
        return tensor


@dataclass(frozen=True, slots=True)
class _State:
    """A PyTorch state."""

    places: dict[str, int]
    tensors: dict[str, torch.Tensor]

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def _open_bin(path: Path) -> _State:
    try:
        # Files older than the zip format cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a corrupt pickle can raise anything
        raise unreadable(path, error) from error
    if not isinstance(state, dict) or not all(_is_plain(value) for value in state.values()):
        raise CheckpointError(
            f"{path} must hold a state_dict of dense tensors with data, got {type(state).__name__} with other values. "
            "Save a state_dict."
        )
    if unnamed := [name for name in state if not isinstance(name, str)]:
        raise CheckpointError(
            f"{path} must hold a state_dict with names as keys, got the key {unnamed[0]!r:.80}. Save a state_dict."
        )
    return _State({name: place for place, name in enumerate(state)}, state)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta


@dataclass(frozen=True, slots=True)
class ScopedWeights:
    """The tensors under a prefix; names are relative to it. Each is cast and moved to the device when it is taken."""

    store: TensorStore
    prefix: str
    dtype: torch.dtype
    device: torch.device
    quantises: bool = False
    """Whether weights of products are rounded to 8 bits as they are read."""

    def under(self, prefix: str) -> ScopedWeights:
        """Extend the prefix."""
        return replace(self, prefix=self.prefix + prefix)

    def place(self, name: str) -> tuple[str, int]:
        """As `TensorStore.place`."""
        return self.store.place(self.prefix + name)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return self.prefix + name in self.store.names()

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the tensor with this name and shape; dtype None is the model's."""
        return self.store.take(self.prefix + name, shape, dtype or self.dtype, self.device)

    def parameter(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return `take`'s tensor as a frozen parameter."""
        return frozen(self.take(name, *shape, dtype=dtype))

    def stacked(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> nn.Parameter:
        """Stack matrices [rows[i], columns] (or vectors [rows[i]]) along the rows, to run as one product."""
        # Before memory is allocated: sizes that only config.json has could be any.
        self.check(names, rows, *columns)
        stack = torch.empty((sum(rows), *columns), dtype=self.dtype, device=self.device)
        for name, part in zip(names, stack.split(list(rows)), strict=True):
            self.store.take_into(self.prefix + name, part)
        return frozen(stack)

    def check(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> None:
        """Raise CheckpointError for tensors that `stacked` cannot stack, without reading their values."""
        for name, count in zip(names, rows, strict=True):
            self.store.check(self.prefix + name, (count, *columns), self.dtype)

    def product(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> nn.Parameter | Fp8Weight:
        """As `stacked`, for the weight of a product: in 8 bits if all are stored so, or if `quantises`."""
        narrow = []
        for name, count in zip(names, rows, strict=True):
            if (part := self.store.take_fp8(self.prefix + name, (count, *columns), self.device)) is None:
                break
            narrow.append(part)
        if len(narrow) == len(names):
            return narrow[0] if len(narrow) == 1 else joined_rows(narrow)
        return held(self.rounded(self.stacked(names, rows, *columns)))

    def rounded(self, weight: torch.Tensor) -> Weight:
        """Return the weight of a product: in 8 bits if `quantises`."""
        return Fp8Weight.of(weight) if self.quantises else weight

    def refuse_unused(self) -> None:
        """Raise CheckpointError for tensors under the prefix that were not taken; all others belong to the target."""
        self.store.refuse_unused(under=self.prefix)


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    """Wrap a tensor in a parameter without a gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def held(weight: Weight) -> nn.Parameter | Fp8Weight:
    """Return a product's weight as a module holds it: an 8-bit weight as it is, others frozen."""
    return frozen(weight) if isinstance(weight, torch.Tensor) else weight


SPREAD = 0.02
"""Standard deviation of random weights; with it states neither vanish nor explode."""


class RandomStore(TensorStore):
    """A stand-in for a checkpoint: every tensor taken is drawn at random, on the device."""

    def __init__(self, config: dict[str, Any], names: list[str], device: torch.device) -> None:
        super().__init__(Path("random"), config, dict.fromkeys(names, Path("random")))
        self._device = device

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Return ones for norms, the identity for token maps, and normal numbers for everything else."""
        self._taken.add(name)
        if name == "d2t":
            return torch.zeros(shape, dtype=torch.int64)
        if name.endswith(("norm.weight", "layernorm.weight")):
            return torch.ones(shape, dtype=dtype, device=self._device)
        return torch.randn(shape, dtype=dtype, device=self._device).mul_(SPREAD)

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Accept every tensor."""

    def take_into(self, name: str, out: torch.Tensor) -> None:
        """Draw a tensor as `take` does."""
        out.copy_(self.take(name, tuple(out.shape), out.dtype))

    def place(self, name: str) -> tuple[str, int]:
        """Return a key that keeps tensors in order."""
        return "", 0

    def take_flat(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return normal numbers."""
        return self.take(name, (size,), dtype)
