"""Somebody's training made faster from outside. `plan` and `script` are ours; all else runs inside their process."""
