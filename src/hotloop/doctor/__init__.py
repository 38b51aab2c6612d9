"""What is wrong with a machine: readings, checks and probes. Imports no torch: a broken one is a finding, no crash."""
