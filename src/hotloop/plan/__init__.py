"""Before a run: what it needs, how long it takes, what it costs and what may interrupt it."""
