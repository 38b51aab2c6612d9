"""The loop: step, precision, schedule, checkpoint, preemption."""
