"""Finds faster settings of a job or a script by short trials in processes of their own."""
