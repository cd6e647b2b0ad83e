"""From a round to the next: inputs of a pass and of step 0, and what a pass leaves behind."""
