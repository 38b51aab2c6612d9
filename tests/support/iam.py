"""What a policy of AWS allows, by the rules of its documentation ("Policy evaluation logic", "Condition operators")."""

import re
from collections.abc import Mapping
from typing import Any

Policy = Mapping[str, Any]


def allows(policy: Policy, action: str, resource: str, **context: str) -> bool:
    """Whether a request is allowed by this policy alone.

    Args:
        context: of the request, by names of conditions with _ for : and - ("s3_prefix").
    """
    values = {_plain(name): value for name, value in context.items()}
    decided = {one["Effect"] for one in policy["Statement"] if _matches(one, action, resource, values)}
    return decided == {"Allow"}


def _matches(statement: Policy, action: str, resource: str, values: Mapping[str, str]) -> bool:
    named = _any(statement["Action"], action) and _any(statement["Resource"], resource)
    conditions = statement.get("Condition", {}).items()
    return named and all(
        _holds(operator, values.get(_plain(key)), wanted)
        for operator, keys in conditions
        for key, wanted in keys.items()
    )


def _holds(operator: str, value: str | None, wanted: str | list[str]) -> bool:
    if operator == "StringNotEquals":  # what is not there is not equal
        return value is None or value not in _list(wanted)
    if value is None:
        return False
    if operator == "NumericLessThan":
        return any(float(value) < float(one) for one in _list(wanted))
    if operator == "StringLike":
        return _any(wanted, value)
    assert operator in ("StringEquals", "Bool")
    return value in _list(wanted)


def _any(patterns: str | list[str], text: str) -> bool:
    return any(re.fullmatch(_expression(pattern), text, re.DOTALL) for pattern in _list(patterns))


def _expression(pattern: str) -> str:
    """`*` and `?` are any letters and one; `${*}`, `${?}` and `${$}` are those letters themselves."""
    parts = re.findall(r"\$\{([*?$])\}|([*?])|(.)", pattern, re.DOTALL)
    return "".join(
        re.escape(own or plain) if own or plain else {"*": ".*", "?": "."}[wild] for own, wild, plain in parts
    )


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _plain(name: str) -> str:
    return re.sub(r"[:_-]", "_", name).lower()
