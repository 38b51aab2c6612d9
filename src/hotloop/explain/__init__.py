"""What ended a training, from its log: the first cause, with its lines and what to type."""
