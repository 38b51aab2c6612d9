"""A job started on an engine: this machine, Slurm, Kubernetes, Ray. No torch."""
