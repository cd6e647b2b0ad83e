"""Parts shared by the kits over engines' own metadata builders: stand-ins for their kernels, pages, records."""
