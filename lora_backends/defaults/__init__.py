"""Operations that every backend has: right for all, and overridden to be faster."""
