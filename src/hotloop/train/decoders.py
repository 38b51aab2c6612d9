"""Which decoder finishes a job's images."""

from collections.abc import Callable
from functools import partial

import torch

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.data.dataset import Dataset
from hotloop.data.images import ImageFiles
from hotloop.data.loader import LoaderSettings
from hotloop.train.decoder_check import check_decoder, encoded_samples
from hotloop.train.decoding import Decoding
from hotloop.train.hardware_decoder import HardwareDecoder, hardware_decoder_is_installed
from hotloop.train.resolve import Choice

_KEY = "data.decode"
_INSTALL = "pip install 'hotloop[gpu-decode]'"


def open_decoding(
    job: Job, dataset: Dataset, settings: LoaderSettings, notify: Callable[[str], None]
) -> tuple[Decoding | None, Choice]:
    """The decoder that `data.decode` asks for, checked, and why it is that one; None: the workers decode alone.

    Raises:
        InputError: a decoder is asked for that is not there.
    """
    asked, device = job.data.decode, torch.device(job.device)

    def only_workers(why: str) -> tuple[None, Choice]:
        if asked == "hardware":
            notify(f'data.decode = "hardware" is not followed: {why}')
        return None, Choice(_KEY, "cpu", why)

    if asked == "cpu" or device.type != "cuda":
        return only_workers("the engines are a GPU's")
    if not isinstance(dataset, ImageFiles):
        return only_workers("no image files are read")
    samples = encoded_samples(dataset, settings.seed)
    if not samples:
        return only_workers("none of the first files is a JPEG that the engines take")
    if not hardware_decoder_is_installed():
        if asked == "hardware":
            raise InputError('data.decode = "hardware"', "nvImageCodec is not installed", _INSTALL)
        return only_workers(f"nvImageCodec is not installed: {_INSTALL}")
    try:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        decoding = Decoding(partial(HardwareDecoder, device), dataset, settings, stream)
    except (ImportError, RuntimeError) as error:
        return only_workers(f"the card's engines cannot be used: {str(error).strip().splitlines()[0]}")
    checked = decoding.run(partial(check_decoder, samples=samples, device=device))
    if checked.fault:
        decoding.close()
        notify(f"the card's JPEG engines are not used: {checked.fault}")
        return only_workers(checked.fault)
    why = f"{checked.images_per_second:,.0f} images/s, at most {checked.difference:.1f} levels from the CPU's"
    return decoding, Choice(_KEY, "hardware", why)
