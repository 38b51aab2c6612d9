"""Arguments to verbs to printed results. The only place that prints or exits."""
