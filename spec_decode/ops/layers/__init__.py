"""What a draft layer is made of: norms, rotations, linear layers of few rows, mixtures, hyper-connections."""
