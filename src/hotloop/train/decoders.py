"""Which decoder finishes a job's images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.data.dataset import Dataset
from hotloop.data.images import ImageFiles
from hotloop.data.loader import LoaderSettings
from hotloop.train.dali_decoder import DaliDecoder, dali_is_installed
from hotloop.train.decoder_check import check_decoder, encoded_samples
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

    def only_workers(why: str) -> tuple[None, Choice]:
        if asked in _KINDS:
            notify(f'data.decode = "{asked}" is not followed: {why}')
        return None, Choice(_KEY, "cpu", why)

    if asked == "cpu" or device.type != "cuda":
        return only_workers("the engines are a GPU's")
    if not isinstance(dataset, ImageFiles):
        return only_workers("no image files are read")
    name = asked if asked in _KINDS else "hardware"
    kind = _KINDS[name]
    if not kind.is_installed():
        if asked == name:
            raise InputError(f'data.decode = "{name}"', f"{kind.library} is not installed", kind.install)
        return only_workers(f"{kind.library} is not installed: {kind.install}")
    samples = encoded_samples(dataset, settings.seed)
    if not samples:
        return only_workers("none of the first files is a JPEG that the engines take")
    try:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        decoding = Decoding(partial(kind.open, device, settings.batch_size), dataset, settings, stream)
    except (ImportError, OSError, RuntimeError) as error:
        return only_workers(f"{kind.library} cannot use the card's engines: {str(error).strip().splitlines()[0]}")
    checked = decoding.run(partial(check_decoder, samples=samples, device=device))
    if checked.fault:
        decoding.close()
        notify(f"the card's JPEG engines are not used: {checked.fault}")
        return only_workers(checked.fault)
    why = f"{checked.images_per_second:,.0f} images/s, at most {checked.difference:.1f} levels from the CPU's"
    return decoding, Choice(_KEY, name, why)
