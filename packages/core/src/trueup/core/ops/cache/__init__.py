"""Writing caches by slot, and the memory formats of tensors."""
