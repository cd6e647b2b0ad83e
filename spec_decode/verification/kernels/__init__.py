"""Operations of verification."""
