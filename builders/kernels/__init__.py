"""Operations on the shared state of a batch, and how an operation is defined and launched."""
