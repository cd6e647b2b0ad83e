"""How the shipped pair was trained, and how to train another draft for its target."""
