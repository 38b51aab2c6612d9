"""A profile as TensorBoard scalars."""

import time
from collections.abc import Sequence
from pathlib import Path

from hotloop.core.errors import InputError
from hotloop.core.profile import Profile
from hotloop.core.tensorboard import without_tensorflow
from hotloop.profile.measured import StepTime


def check_tensorboard() -> None:
    """See that its writer is installed.

    Raises:
        InputError: it is not.
    """
    without_tensorflow()
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError as error:
        raise InputError("--tensorboard needs tensorboard", str(error), "pip install tensorboard") from error


def write_events(folder: Path, profile: Profile, steps: Sequence[StepTime]) -> None:
    """Write `step/seconds` and `step/input_seconds` by watched step, `share/KIND` and `gain/NAME` once.

    Args:
        folder: to be made.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    scalars = [("step/seconds", step.seconds, number) for number, step in enumerate(steps)]
    scalars += [("step/input_seconds", step.input, number) for number, step in enumerate(steps)]
    scalars += [(f"share/{kind}", share, 0) for kind, share in profile.shares.items()]
    scalars += [(f"gain/{one.name}", one.gain, 0) for one in profile.ablations]
    writer = EventFileWriter(str(folder))
    for tag, value, step in scalars:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    writer.close()
