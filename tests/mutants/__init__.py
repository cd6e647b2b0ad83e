"""Backends broken in one way each. The kit is good only if a named check kills every one of them."""

from tests.mutants.attention import ATTENTION_MUTANTS
from tests.mutants.builders import BUILDER_MUTANTS
from tests.mutants.claims import CLAIM_MUTANTS, FUSED_WRITE_MUTANTS
from tests.mutants.draft_shapes import DRAFT_SHAPE_MUTANTS
from tests.mutants.edges import EDGE_MUTANTS, ONE_PAGE_SIZE

MUTANTS = (*BUILDER_MUTANTS, *ATTENTION_MUTANTS, *DRAFT_SHAPE_MUTANTS)
ALL_MUTANTS = (*MUTANTS, *CLAIM_MUTANTS, *FUSED_WRITE_MUTANTS, *EDGE_MUTANTS, ONE_PAGE_SIZE)
