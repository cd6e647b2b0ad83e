"""Operations around step 0."""
