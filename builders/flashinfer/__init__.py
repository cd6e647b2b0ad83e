"""FlashInfer's metadata: a plan made on the host or on the device, for wrappers whose buffers persist.

`PlanLayout`, `TableRows` and `replan` work on any wrapper, including an engine's, and do not import FlashInfer.
"""

from builders.flashinfer.layout import PlanLayout
from builders.flashinfer.plan import replan
from builders.flashinfer.table_rows import TableRows

__all__ = ["PlanLayout", "TableRows", "replan"]
