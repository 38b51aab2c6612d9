"""The templates, and how they write numbers."""

from jinja2 import Environment, PackageLoader

from hotloop.core.units import count, format_amount, format_bytes, format_seconds


def environment() -> Environment:
    """Templates that escape what they are given."""
    made = Environment(loader=PackageLoader("hotloop.pages"), autoescape=True, trim_blocks=True)
    made.filters |= {"seconds": format_seconds, "bytes": format_bytes, "count": count, "amount": format_amount}
    return made
