"""FlashInfer's metadata: a plan made on the host or on the device, over wrappers whose buffers stay.

`PlanLayout`, `TableRows` and `replan` work on any wrapper, whoever made it, and need no FlashInfer themselves.
"""

from builders.flashinfer.layout import PlanLayout
from builders.flashinfer.plan import replan
from builders.flashinfer.table_rows import TableRows

__all__ = ["PlanLayout", "TableRows", "replan"]
