"""Readers, each in a process of its own: one that hangs, or a library that crashes, takes nothing else with it.

`python -m hotloop.doctor.readers NAME` prints what one read as JSON.
"""

ANSWER = "hotloop-answer "
"""Before what a reader found: libraries print too."""
