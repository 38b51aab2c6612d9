"""What looks like a secret, wherever it stands: it is neither told nor written down."""

import re

_TOKENS = (
    r"\bhf_[A-Za-z0-9]{20,}", r"\bgh[pousr]_[A-Za-z0-9]{20,}", r"\bgithub_pat_\w{20,}", r"\bglpat-[\w-]{15,}",
    r"\bnvapi-[\w-]{20,}", r"\bA(KI|SI)A[0-9A-Z]{16}\b", r"\bsk-(proj|ant|or)-[\w-]{16,}", r"\bsk-[A-Za-z0-9]{20,}",
    r"\bsk_live_\w{16,}", r"\bxox[abeprs]-[\w-]{10,}", r"\bnpm_[A-Za-z0-9]{30,}", r"\bpypi-AgE\w{10,}",
    r"\bAIza[\w-]{35}", r"\beyJ[\w-]{10,}\.[\w-]{10,}\.", r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
)  # fmt: skip
"""Of Hugging Face, GitHub, GitLab, NVIDIA, AWS, OpenAI and others, Stripe, Slack, npm, PyPI, Google; signed; keys."""
_PLACES = (
    r"\w://[^/\s:@]*:(?!\$)[^/\s@]+@",  # a password in an address
    r"\bhttps?://(?!\$)[^/\s:@]{16,}@",  # a token in the user's place
    r"[?&;](sig|signature|x-amz-signature|token|access_token|api_key|accountkey)=(?!\$)[^&;\s]{6,}",
    r"\bauthorization:\s*\w+\s+(?!\$)\S{8,}",
    r"\bbearer\s+(?!\$)[\w.~+/=-]{16,}",
    r"\bbasic\s+[a-z0-9+/]{6,}={1,2}",
    r"\blogin\s(.*\s)?[0-9a-f]{40}\b",
)
_SECRET = re.compile("|".join(_TOKENS) + "|(?i:" + "|".join(_PLACES) + ")")


def is_secret(text: str) -> bool:
    """Whether a text holds a token, a key or a password of a known form, or in a place where one belongs."""
    return bool(_SECRET.search(text))
