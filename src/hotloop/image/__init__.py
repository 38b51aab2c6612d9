"""Container images for training: rendered from solved versions, built, checked."""
