"""Operations of the models' layers."""
