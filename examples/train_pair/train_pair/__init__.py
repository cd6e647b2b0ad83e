"""How the shipped pair was trained, and how to train one more draft of its target."""
