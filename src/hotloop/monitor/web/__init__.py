"""Pages about runs and live trainings for a browser on this machine. Imports no torch and no matplotlib."""
