"""What the kits over engines' own metadata builders share: kernels that stand in for theirs, pages, records."""
