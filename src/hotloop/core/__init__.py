"""The nouns: job, machine, run; their errors and units. Imports no torch and no verb."""
