"""Checks: each looks at a record and yields what it sees. Grouped as they are shown."""
