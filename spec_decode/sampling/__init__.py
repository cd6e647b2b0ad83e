"""How tokens are sampled: parameters, noise, the draft's and the target's samplers."""
