"""What a job takes on each kind of machine: whether it fits, how long, how much it costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.plan.cards import Card
from hotloop.plan.footprint import Footprint
from hotloop.plan.memory import Division, Memory, least_bytes, memory_of
from hotloop.plan.prices import Offer
from hotloop.plan.seconds import StepTime, step_time
from hotloop.plan.trace import Way
from hotloop.plan.ways import Ways
from hotloop.train.resolve import STATE_SHARE
from hotloop.train.sharded import check_divisible, indivisible
from hotloop.train.source import DEVICE_SHARE
from hotloop.train.world import DIVIDED, TENSOR, check_shardable, check_teams, needs_whole, team_size


@dataclass(frozen=True)
class Workload:
    """What has to be computed.

    Attributes:
        model: on no device.
        steps: of the whole training.
        recomputes: whether activations of the model may be recomputed.
        compiled: whether the model is compiled.
        arrays: bytes of data that may lie on the GPU as a whole.
        scale: what a measured step took of the planned one; source: of the time.
    """

    job: Job
    model: nn.Module
    steps: int
    recomputes: bool
    compiled: bool
    arrays: float = 0.0
    scale: float = 1.0
    source: str = "roofline"

    def precision(self, card: Card) -> str:
        """What the job asks for, or what it has on such a card."""
        asked = self.job.precision
        return asked if asked != "auto" else card.precision


@dataclass(frozen=True)
class Setup:
    """A way to train on some GPUs of a kind.

    Attributes:
        parallel, activations, precision: as the job file calls them.
        batch: samples of a GPU.
        fits: whether its memory suffices.
        way: as it was traced.
    """

    card: Card
    gpus: int
    parallel: str
    activations: str
    precision: str
    batch: int
    fits: bool
    memory: Memory
    time: StepTime
    way: Way

    @property
    def key(self) -> tuple[object, ...]:
        """What a user tells it from others by."""
        return self.card.key, self.gpus, self.parallel, self.precision, self.activations


@dataclass(frozen=True)
class Option:
    """A setup with what it takes, and where it is to be had.

    Attributes:
        seconds: of the whole training, undisturbed.
        cost, spot_cost: of it, as long as nothing is interrupted; None where the price is not known.
    """

    setup: Setup
    offer: Offer | None
    seconds: float
    epoch_seconds: float
    cost: float | None
    cost_per_epoch: float | None
    spot_cost: float | None


@dataclass(frozen=True)
class _Choice:
    """One way on some GPUs, and what comes of it."""

    work: Workload
    ways: Ways
    card: Card
    division: Division
    activations: str

    @property
    def precision(self) -> str:
        return self.work.precision(self.card)

    @property
    def way(self) -> Way:
        batch = -(-self.work.job.data.batch_size // self.division.data)
        traced = traced_precision(self.precision)
        return Way(batch, traced, self.activations, self.work.compiled, self.division.weights)

    def memory(self, footprint: Footprint) -> Memory:
        train = self.work.job.train
        data = self.work.arrays if self.work.arrays <= DEVICE_SHARE * self.card.memory_bytes else 0.0
        halved = self.precision in ("bf16", "float8")
        averaged, accumulates = train.ema > 0, train.accumulate > 1
        return memory_of(footprint, self.division, averaged, accumulates, self.card.memory_bytes, data, halved)

    def fits(self, footprint: Footprint) -> bool:
        return self.memory(footprint).peak <= self.card.memory_bytes

    def may_fit(self) -> bool:
        """As far as can be told without tracing."""
        least = least_bytes(self.ways.state, self.division) + self.ways.least_activations(self.way)
        return least <= self.card.memory_bytes

    def time(self, footprint: Footprint) -> StepTime:
        work = self.work
        own = work.job.speed.kernels is not False and self.precision != "fp32"
        windows = work.job.train.accumulate
        time = step_time(footprint, self.card, self.precision, self.division, windows, work.compiled, own)
        scale = work.scale
        return StepTime(
            scale * time.seconds, scale * time.low, scale * time.high, scale * time.exchange, source=work.source
        )

    def setup(self) -> Setup:
        footprint = self.ways.footprint(self.way)
        times = self.time(footprint)
        return Setup(
            self.card, self.division.ranks, self.division.name, self.activations, self.precision, self.way.batch,
            self.fits(footprint), self.memory(footprint), times, self.way,
        )  # fmt: skip


def setup_for(work: Workload, ways: Ways, card: Card, gpus: int) -> Setup:
    """How to train on so many GPUs: as the job says; what it leaves open, so that it fits.

    Raises:
        InputError: activations of the model cannot be recomputed, or the job does not go with so many GPUs.
    """
    choices = _choices(work, ways, card, gpus)
    for choice in choices[:-1]:
        if choice.may_fit() and (setup := choice.setup()).fits:
            return setup
    return choices[-1].setup()


def largest_batch(work: Workload, ways: Ways, setup: Setup) -> int:
    """The largest batch of one GPU for which a setup fits; 0 if there is none."""
    for choice in _choices(work, ways, setup.card, setup.gpus):
        if (choice.division.name, choice.activations) == (setup.parallel, setup.activations):
            return ways.largest(choice.way, choice.fits)
    raise AssertionError("unreachable: a setup is one of the choices")


def priced(work: Workload, setup: Setup, offer: Offer | None) -> Option:
    """What the training costs there."""
    seconds, epochs = work.steps * setup.time.seconds, work.job.train.epochs

    def cost(hour: float | None) -> float | None:
        return None if hour is None else hour * seconds / 3600

    total = cost(offer.on_demand if offer else None)
    each = None if total is None else total / epochs
    return Option(setup, offer, seconds, seconds / epochs, total, each, cost(offer.spot if offer else None))


def _choices(work: Workload, ways: Ways, card: Card, gpus: int) -> list[_Choice]:
    """As the job has it; and with blocks recomputed, where that is possible and it did not fit."""
    check_teams(work.job)
    job = work.job.model_copy(update={"precision": work.precision(card)})
    asked, kept, size = job.parallel, job.speed.activations, team_size(job, gpus)
    if gpus > 1 and asked in TENSOR and (gpus % size or (asked == "tp" and gpus != size)):
        whole = size if asked == "tp" else size * max(1, gpus // size)
        raise InputError(f"{gpus} GPUs in teams of {size}", f'parallel = "{asked}": teams are whole', f"--gpus {whole}")
    if asked == "auto":  # as `train` decides
        fits = least_bytes(ways.state, Division()) <= STATE_SHARE * card.memory_bytes
        asked = "ddp" if fits or indivisible(work.model) or needs_whole(job)[0] else "fsdp"
    if gpus > 1 and asked in DIVIDED:
        check_shardable(job.model_copy(update={"parallel": asked}))
        check_divisible(work.model, weights=asked != "tp", team=size)
    division = {
        "none": Division(), "ddp": Division(gpus), "fsdp": Division(gpus, weights=True),
        "tp": Division(gpus, tensor=size), "fsdp+tp": Division(gpus, weights=True, tensor=size),
    }[asked] if gpus > 1 else Division()  # fmt: skip
    if division.data > (batch := work.job.data.batch_size):
        fewer = f"--gpus {batch * division.tensor}"
        raise InputError(f"{gpus} GPUs share batches of {batch}", "each needs a sample at least", fewer)
    activations = [kept, "blocks"] if work.recomputes and kept != "blocks" else [kept]
    return [_Choice(work, ways, card, division, how) for how in activations]


def traced_precision(precision: str) -> str:
    """That takes as many bytes."""
    return "bf16" if precision in ("bf16", "fp16", "float8") else "fp32"


def by_cost(options: Sequence[Option]) -> list[Option]:
    """Those that fit first, cheapest first; those without a price after them."""
    return sorted(options, key=lambda one: (not one.setup.fits, one.cost is None, one.cost or one.seconds))


def by_time(options: Sequence[Option]) -> list[Option]:
    """Those that fit first, fastest first."""
    return sorted(options, key=lambda one: (not one.setup.fits, one.seconds, one.cost is None, one.cost or 0.0))
