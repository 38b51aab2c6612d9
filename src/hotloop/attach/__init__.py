"""Starts hotloop inside somebody else's Python processes. Nothing here, nor in what is started there, needs more than
the standard library: those processes may be of another environment.
"""
