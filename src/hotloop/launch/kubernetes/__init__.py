"""Kubernetes: a Job on one machine, a JobSet or a TrainJob on several."""
