"""Operations of sampling."""
