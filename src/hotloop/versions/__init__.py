"""Which torch, CUDA, driver, card and Python go together."""
