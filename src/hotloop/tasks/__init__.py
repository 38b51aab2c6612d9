"""Tasks: what is trained. The protocol is in `task`; ready ones stand beside it."""
