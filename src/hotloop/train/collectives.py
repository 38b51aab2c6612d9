"""What this rank sent to the others last, from torch's flight recorder."""

import json
from typing import Any

import torch

_NO_DESCRIPTION = ("", "undefined")
_DIGITS_SHOWN = 8


def last_collective() -> str:
    """The last one in words; empty if there is none, or nothing is recorded.

    Steps that are replayed as a CUDA graph record nothing.
    """
    recorder: Any = torch._C._distributed_c10d
    named = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # gloo's and NCCL's, which torch for CPUs has not
    dumps = [getattr(recorder, name) for name in named if hasattr(recorder, name)]
    entries = [entry for dump in dumps for entry in json.loads(dump()).get("entries", [])]
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    sizes = ", ".join(f"{kind} {size}" for kind, size in zip(last["input_dtypes"], last["input_sizes"], strict=True))
    state = "done" if last["retired"] or last["state"] == "completed" else "not done"
    of = f" of {sizes}" if sizes else ""
    number = last["p2p_seq_id"] if last["is_p2p"] else last["collective_seq_id"]
    return f"{last['profiling_name']}{of}, number {number}{_group(*last['process_group'])}, {state}"


def _group(name: str, description: str) -> str:
    """Each counts for itself. One that nobody has described has a number, or a hash of which the beginning tells it."""
    if description not in _NO_DESCRIPTION:
        return f" in {description}"
    return f" in group {name[:_DIGITS_SHOWN]}" if name else ""
