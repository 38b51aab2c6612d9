"""What watches machines and trainings: the exporter of metrics. Imports no torch."""
