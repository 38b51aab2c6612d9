"""Watching trainings: what is told to Prometheus and Grafana. Imports no torch."""
