"""Where a training's time goes. `watch` and what it imports run inside the script's process, on the standard library
and its torch; the rest makes a profile of what they found.
"""
