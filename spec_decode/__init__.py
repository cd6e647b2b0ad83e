"""Top floor: the multi-step drafter, its strategies and graphs, and the proof that they are right."""
