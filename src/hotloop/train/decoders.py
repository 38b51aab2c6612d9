"""Which decoder finishes a job's images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.data.dataset import Dataset
from hotloop.data.images import ImageFiles
from hotloop.data.loader import LoaderSettings
from hotloop.train.compiler import first_words
from hotloop.train.dali_decoder import DaliDecoder, dali_is_installed
from hotloop.train.decoder_check import SAMPLES, Checked, Encoded, check_decoder, encoded_samples
from hotloop.train.decoding import Decoding, DeviceDecoder
from hotloop.train.hardware_decoder import HardwareDecoder, nvjpeg_library
from hotloop.train.resolve import Choice

_KEY = "data.decode"


@dataclass(frozen=True)
class _Kind:
    """A kind of decoder.

    Attributes:
        library: that it needs.
        install: how to get it.
        open: of a device, for so many images at once.
    """

    library: str
    install: str
    is_installed: Callable[[], object]
    open: Callable[[torch.device, int], DeviceDecoder]


def _open_hardware(device: torch.device, most: int) -> DeviceDecoder:
    library = nvjpeg_library()
    assert library
    return HardwareDecoder(device, library)


_KINDS = {
    "hardware": _Kind("nvJPEG", "pip install 'hotloop[gpu-decode]'", nvjpeg_library, _open_hardware),
    "dali": _Kind("DALI", "pip install 'hotloop[dali]'", dali_is_installed, DaliDecoder),
}


def open_decoding(
    job: Job, dataset: Dataset, settings: LoaderSettings, notify: Callable[[str], None]
) -> tuple[Decoding | None, Choice]:
    """The decoder that `data.decode` asks for, checked, and why it is that one; None: the workers decode alone.

    Raises:
        InputError: a decoder is asked for that is not there.
    """
    asked, device = job.data.decode, torch.device(job.device)
    why = _obstacle(job, dataset)
    name = asked if asked in _KINDS else "hardware"
    kind = _KINDS[name]
    if not why and not kind.is_installed():
        if asked == name:
            raise InputError(f'data.decode = "{name}"', f"{kind.library} is not installed", kind.install)
        return None, Choice(_KEY, "cpu", f"{kind.library} is not installed: {kind.install}")
    samples = [] if why else encoded_samples(dataset, settings.seed)
    if not why and not samples:
        why = "none of the first files is a whole baseline JPEG in colour that is small enough"
    if why:
        if asked in _KINDS:
            notify(f'data.decode = "{asked}" is not followed: {why}')
        return None, Choice(_KEY, "cpu", why)
    decoding, checked = _checked(kind, samples, dataset, settings, device)
    if decoding is None:
        notify(f"the card's JPEG engines are not used: {checked.fault}")
        return None, Choice(_KEY, "cpu", checked.fault)
    found = f"{checked.images_per_second:,.0f} images/s, at most {checked.difference:.1f} levels from the CPU's"
    return decoding, Choice(_KEY, name, found)


def _obstacle(job: Job, dataset: Dataset) -> str:
    """Why no decoder of the device can serve this job, whichever there is."""
    if job.data.decode == "cpu" or job.device != "cuda":
        return "the engines are a GPU's"
    if not isinstance(dataset, ImageFiles):
        return "no image files are read"
    return "workers resize the crops, as Triton is not installed" if dataset.resize else ""


def _checked(
    kind: _Kind, samples: Sequence[Encoded], dataset: Dataset, settings: LoaderSettings, device: torch.device
) -> tuple[Decoding | None, Checked]:
    """The decoder, if it can be trusted, and what its check found."""
    try:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        most = max(SAMPLES, settings.part_size)
        decoding = Decoding(partial(kind.open, device, most), dataset, settings, stream)
    except (ImportError, OSError, RuntimeError) as error:
        return None, Checked(f"{kind.library} cannot use them: {first_words(error)}")
    try:
        checked = decoding.run(partial(check_decoder, samples=samples, device=device))
    except BaseException:
        decoding.close()
        raise
    if checked.fault:
        decoding.close()
        return None, checked
    return decoding, checked
