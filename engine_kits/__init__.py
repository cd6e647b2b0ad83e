"""Kits over engines' own metadata builders, a folder for each engine, and what they share. In a checkout only: they use
the conformance kit of spec_decode, and no user of the library needs them."""
