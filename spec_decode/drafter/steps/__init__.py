"""The device work of a round, by what the draft proposes in a step: a token, a tree, a block, or a token a module."""
