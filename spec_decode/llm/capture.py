"""Capture an engine's graphs, and say which layer of a model keeps it from being captured."""

from __future__ import annotations

from types import TracebackType

from torch import nn

from spec_decode.engine import Engine
from spec_decode.graphs import CaptureError
from spec_decode.model_api import TargetModel
from spec_decode.models import CheckpointError


def capture(engine: Engine, target: TargetModel) -> None:
    """Capture the engine's graphs. Raises CheckpointError, which names the layer, for a target whose forward reads the
    device on the host or makes shapes that depend on data."""
    try:
        engine.capture()
    except CaptureError as error:
        if (layer := _layer_of(error, target)) is None:
            raise
        raise CheckpointError(
            f"layer {layer} of the target cannot be captured in a graph: {error} Let the model compute this on the "
            "device if it can, such as experts without experts_implementation in config.json, or in bfloat16; or run "
            "it without graphs, in an Engine with EngineConfig(graph_mode=GraphMode.NONE)."
        ) from error


def _layer_of(error: BaseException, target: TargetModel) -> str | None:
    """Return the innermost of the target's modules in which the error was raised: its path and class."""
    paths = {id(module): path for path, module in target.named_modules() if path}
    found = None
    for at in (error.__traceback__, getattr(error.__cause__, "__traceback__", None)):
        for module in _modules(at):
            if path := paths.get(id(module)):
                found = f"{path} ({type(module).__name__})"
    return found


def _modules(at: TracebackType | None) -> list[nn.Module]:
    modules = []
    while at is not None:
        owner = at.tb_frame.f_locals.get("self")
        modules += [owner] if isinstance(owner, nn.Module) else []
        at = at.tb_next
    return modules
