"""Who may do what in object storage, how it is reached, and how what lies there is encrypted; no torch."""
