"""Probes of `hotloop doctor --deep`, run by processes of their own: `python -m hotloop.doctor.probing GPU NAME ...`.

Each prints a line of JSON when it begins and one when it ends, so that whoever waits knows which one hung.
"""
