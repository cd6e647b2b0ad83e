"""How a greedy draft reads its head, as ATTN_BACKENDS_DRAFT_HEAD says. Needs no vLLM: the doctor reads it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch

from attn_backends.engines.vllm.names import DRAFT_HEAD


class HeadChoice(NamedTuple):
    """How a draft reads its head.

    rounds  from a copy in 8 bits
    path    file of the token ids that it may draft; None: it may draft all
    ids     those in the file, ascending
    """

    rounds: bool
    path: Path | None = None
    ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, value: str) -> HeadChoice:
        """Read the variable's value, and its file. Raises ValueError for a value that means nothing, and for a file
        that cannot be read, is empty or holds anything but different token ids."""
        bits, colon, name = value.partition(":")
        if bits not in ("16", "fp8") or bool(colon) is not bool(name):
            raise ValueError(
                f"{DRAFT_HEAD} must be 16 or fp8, or one of them with a file of token ids, such as fp8:ids.json, got "
                f"{value!r}. Unset it to leave the head to vLLM."
            )
        path = Path(name).expanduser() if name else None
        return cls(bits == "fp8", path, None if path is None else _token_ids(path))

    @property
    def copies(self) -> bool:
        """Whether the draft reads a copy of its head."""
        return self.rounds or self.ids is not None


def _token_ids(path: Path) -> tuple[int, ...]:
    try:
        found = torch.load(path, weights_only=True) if path.suffix == ".pt" else json.loads(path.read_text())
    except Exception as error:
        # torch's own messages advise to load files that run code.
        reason = error if isinstance(error, (OSError, ValueError)) else type(error).__name__
        raise ValueError(
            f"{DRAFT_HEAD}: {path} cannot be read: {reason}. Use a JSON list of token ids, or a list or tensor saved "
            "by torch as .pt."
        ) from error
    ids = found.tolist() if isinstance(found, torch.Tensor) else found
    if not isinstance(ids, list) or not ids:
        raise ValueError(
            f"{DRAFT_HEAD}: {path} holds {type(found).__name__} {ids!r:.40}. It must hold a list of token ids."
        )
    seen = set[int]()
    for at, token in enumerate(ids):
        if type(token) is not int or token < 0 or token in seen:
            raise ValueError(
                f"{DRAFT_HEAD}: {path} has {token!r} as entry {at}, which is no token id or is in the file twice. Use "
                "different ids of the target's tokenizer."
            )
        seen.add(token)
    return tuple(sorted(seen))
