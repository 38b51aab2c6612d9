"""Files in, batches out: data sets, their order, decoding, and the workers that fill batches ahead of the step.

Nothing in this package imports torch: workers start in a quarter of a second and stay small.
"""
