"""The job: what to train, on which data, how. A TOML file, validated; every key has a description and a default.

Relative paths in a job are relative to the current directory, as in every other command's arguments.
"""

import re
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    WithJsonSchema,
)

from hotloop.core.kubernetes_names import (
    DeviceName,
    LabelKey,
    LabelValue,
    Name,
    NameOrNone,
    NamespaceOrNone,
    SecretKey,
    Taint,
    Variable,
)
from hotloop.core.units import Interval

FORMAT = 1
"""The newest job format that this version reads."""


def _interval(value: object) -> object:
    return value if value == "auto" or isinstance(value, Interval) else Interval.parse(str(value))


def _in_seconds(value: object) -> Interval:
    interval = value if isinstance(value, Interval) else Interval.parse(str(value), _TIMES)
    if interval.unit != "seconds":
        raise ValueError(f"{interval} is no time; write {_TIMES}")
    return interval


def _at_most_a_day(interval: Interval) -> Interval:
    if interval.amount > _DAY_SECONDS:  # torch counts milliseconds in 32 bits, and some limits are ten times this one
        raise ValueError("it is more than 24 h")
    return interval


def _in_steps(value: object) -> Interval:
    interval = value if isinstance(value, Interval) else Interval.parse(str(value), _STEPS)
    if interval.unit == "seconds":
        raise ValueError(f"{interval} is a time; schedules go by {_STEPS}")
    return interval


def _like(*examples: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": list(examples)})


_DAY_SECONDS = 24 * 3600
_TIMES, _STEPS = '"90 s", "5 min" or "2 h"', '"500 steps" or "1 epoch"'
TimeText = Annotated[Interval, BeforeValidator(_in_seconds), PlainSerializer(str), _like("90 s", "5 min", "2 h")]
StepsText = Annotated[Interval, BeforeValidator(_in_steps), PlainSerializer(str), _like("500 steps", "1 epoch")]
AutoInterval = Annotated[
    Interval | Literal["auto"], BeforeValidator(_interval), PlainSerializer(str),
    _like("100 steps", "1 epoch", "30 s", "auto"),
]  # fmt: skip
Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(strict=True, gt=0)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]


def _ascending(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError(f"the first, {pair[0]:g}, must not be more than the second, {pair[1]:g}")
    return pair


class Section(BaseModel):
    """A table of the job file: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


_SLURM_TIME = r"^(\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2})?$"


class AugmentSection(Section):
    """How training images are varied; every draw depends on seed, epoch and image alone."""

    crop_scale: Annotated[tuple[Probability, Probability], AfterValidator(_ascending)] = Field(
        (0.08, 1.0), description="share of the image's area that a random crop keeps, lowest and highest; [1, 1]: none"
    )
    crop_ratio: Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_ascending)] = Field(
        (0.75, 4 / 3), description="width to height of a random crop, lowest and highest"
    )
    flip: Probability = Field(0.5, description="probability of a horizontal flip")
    shift: NonNegativeInt = Field(0, description="images in a .npz file: largest random shift, pixels, edges mirrored")
    randaugment: NonNegativeInt = Field(0, description="magnitude of RandAugment (1 to 30), one draw a batch; 0: off")
    mixup: NonNegativeFloat = Field(0.0, description="alpha of MixUp; 0: off")
    cutmix: NonNegativeFloat = Field(0.0, description="alpha of CutMix; 0: off. With mixup, each batch takes one")


class ImagesTask(Section):
    """Image classification: class folders or a list of files in, class numbers out."""

    name: Literal["images"] = Field("images", description='the task: "images", or your own as "module:Class"')
    image_size: Annotated[PositiveInt, Field(le=8192)] = Field(
        224, description="height and width of what the model sees, pixels"
    )
    center_crop: Annotated[float, Field(gt=0, le=1)] = Field(
        0.875, description="side of the validation crop as a share of the image's shorter side"
    )
    mean: tuple[float, float, float] = Field((0.485, 0.456, 0.406), description="mean of each channel, 0 to 1")
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = Field(
        (0.229, 0.224, 0.225), description="standard deviation of each channel, 0 to 1"
    )
    label_smoothing: Probability = Field(0.0, description="share of the target spread over all classes")
    max_pixels: PositiveInt = Field(
        100_000_000, description="an image of more pixels counts as damaged (decompression bombs)"
    )
    augment: AugmentSection = Field(default_factory=lambda: AugmentSection())


class TokensTask(Section):
    """Language modelling: a file of token numbers in, the next token out."""

    name: Literal["tokens"] = Field("tokens", description='the task: "tokens"')
    context: Annotated[PositiveInt, Field(le=2**20)] = Field(1024, description="tokens that the model sees at once")
    vocabulary: Annotated[PositiveInt, Field(ge=2, le=2**31)] = Field(
        50304, description="token numbers; GPT-2's 50,257 are 50,304 here, as matrix units like multiples of 64"
    )


class CustomTask(Section):
    """A task of the user's own: a subclass of `hotloop.Task`."""

    name: str = Field(pattern=r"^[\w.]+:[\w.]+$", description='"module:Class", imported from the current directory')
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the class")


TASKS: dict[str, type[Section]] = {"images": ImagesTask, "tokens": TokensTask}


def _task_kind(value: object) -> str:
    name = value.get("name", "images") if isinstance(value, dict) else getattr(value, "name", "images")
    return "custom" if ":" in str(name) else "tokens" if name == "tokens" else "images"


class DataSection(Section):
    """What to train on."""

    train: str = Field(
        description="images: a folder of class folders, a .csv or .jsonl list of path and label, .tar shards, .parquet "
        "files, a .npz of images and labels. tokens: a .npy or .bin of token numbers"
    )
    val: str | None = Field(None, description="the same for validation; without it nothing is validated")
    batch_size: PositiveInt = Field(64, description="samples a batch")
    val_batch_size: PositiveInt | Auto = Field("auto", description="samples a validation batch; auto: twice batch_size")
    last_batch: Literal["keep", "drop", "pad"] = Field(
        "keep", description="a short last batch of an epoch: trained on as it is, left out, or padded to batch_size"
    )
    workers: Annotated[NonNegativeInt, Field(le=256)] | Auto = Field(
        "auto", description="processes that read data; 0: the training process itself; auto: by the usable processors"
    )
    decode: Literal["auto", "cpu", "hardware", "dali"] = Field(
        "auto",
        description="who decodes JPEGs: the processors alone, each whole; the card's engines too, as many as they have "
        "time for; DALI in their place; auto: hardware, if it passes a check at the start",
    )
    cache_gib: NonNegativeFloat = Field(
        20.0,
        description="GiB of object storage (s3://...) that each of train and val may keep on the local disk; 0: none",
    )
    on_corrupt: Literal["replace", "raise"] = Field(
        "replace", description="a file that cannot be read is replaced by another, counted and named; or stops the run"
    )


class ModelSection(Section):
    """What to train."""

    name: str = Field(
        description='images: a torchvision or timm model. tokens: gpt2, llama-3.2-1b, ... Or "module:callable"'
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the model's constructor")
    keep_fp32: list[str] = Field(
        default_factory=list, description='layers that compute in fp32, by name or class: ["head", "LayerNorm"]'
    )


class TrainSection(Section):
    """How long, and in what portions."""

    epochs: PositiveInt = Field(10, description="passes over the training data")
    accumulate: PositiveInt = Field(1, description="batches a step; a short last window is weighted by its samples")
    clip_norm: NonNegativeFloat = Field(0.0, description="largest norm of the gradient; 0: no clipping")
    ema: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="decay of the averaged weights that are validated, 0.999 for example; 0: off"
    )


class OptimizerSection(Section):
    """How weights follow gradients."""

    name: str = Field("sgd", description='an optimizer of torch.optim in lower case, or "module:callable"')
    learning_rate: PositiveFloat = Field(0.1, description="the highest learning rate of the schedule")
    weight_decay: NonNegativeFloat = Field(0.0, description="weight decay of matrices and kernels")
    decay_vectors: bool = Field(False, description="decay biases and the gains of normalisation too")
    arguments: dict[str, Any] = Field(default_factory=dict, description="other keyword arguments: { momentum = 0.9 }")


class ScheduleSection(Section):
    """How the learning rate moves, step by step."""

    name: Literal["constant", "cosine", "step", "one-cycle"] = Field(
        "cosine", description="constant, cosine, step or one-cycle"
    )
    warmup: StepsText | None = Field(
        None, description='linear warm-up at the start ("500 steps", "1 epoch"); one-cycle without it: 30 % of the run'
    )
    final: Probability = Field(
        0.0, description="learning rate at the end as a share of the highest (cosine, one-cycle)"
    )
    every: StepsText = Field(Interval(30, "epochs"), description="distance of the drops (step)")
    factor: Probability = Field(0.1, description="what each drop multiplies by (step)")


class SpeedSection(Section):
    """How fast; nothing here changes what is computed beyond rounding."""

    channels_last: bool | Auto = Field("auto", description="memory layout for convolutions; auto: on a GPU")
    compile: bool | Literal["blocks", "auto"] = Field(
        "auto", description="torch.compile of the model, or of its repeated blocks; auto: on a GPU, for long runs"
    )
    kernels: bool | Auto = Field(
        "auto", description="with compile: hotloop's own kernels around convolutions, in bf16 and fp16; auto: on a GPU"
    )
    graph: bool | Auto = Field("auto", description="the whole step as one CUDA graph; auto: on a GPU, where possible")
    activations: Literal["keep", "selective", "blocks"] = Field(
        "keep", description="what backward needs: kept, or recomputed to save memory (cheap parts; whole blocks)"
    )
    recover: bool = Field(True, description="when memory runs out, go on with the same batch in smaller pieces")
    cudnn_benchmark: bool | Auto = Field("auto", description="let cuDNN try its algorithms; auto: on a GPU")
    keep_memory: bool | Auto = Field(
        "auto", description="keep freed memory for the next step instead of giving it back; auto: on a CPU"
    )


class CheckpointSection(Section):
    """What an interruption may cost at most."""

    every: AutoInterval = Field(
        "auto", description='"100 steps", "1 epoch", "30 s"; auto: each epoch, and by Young\'s formula within it'
    )
    keep: PositiveInt = Field(2, description="how many of the newest checkpoints stay")
    background: bool | Auto = Field(
        "auto", description="written by another process meanwhile; auto: large ones, if the host can hold a copy"
    )
    copy_to: str = Field("", description='a place in object storage that they are copied to: "s3://bucket/folder"')
    interruption: TimeText = Field(
        Interval(4 * 3600, "seconds"), description="expected between two of them, for auto, before the run has had any"
    )


class PreemptionSection(Section):
    """What tells that this machine is about to be taken away, besides signals: then the run saves and stops."""

    cloud: Literal["auto", "off", "aws", "gcp", "azure"] = Field(
        "auto", description="whose metadata service is asked; auto: that of the cloud this machine is in, if any"
    )
    address: str = Field(
        "", pattern=r"^(https?://.+)?$", description="of that service, http://...; empty: where clouds have it"
    )
    file: str = Field("", description="a notice, once it exists")
    every: PositiveFloat = Field(5.0, le=3600, description="seconds between two looks, 3,600 at most")


class RanksSection(Section):
    """The processes that train one model together."""

    processes: PositiveInt | Auto = Field("auto", description="how many on this machine; auto: one for each GPU")
    restarts: NonNegativeInt = Field(
        3, description="if one is lost all are started again, so often from the same checkpoint"
    )
    tensor: PositiveInt | Auto = Field(
        "auto", description="of them compute each layer together; auto: tp all, fsdp+tp 2"
    )
    gradients: Literal["fp32", "bf16"] = Field("fp32", description="as which they travel; bf16: half as many bytes")
    static_graph: bool = Field(
        False, description="under ddp: which weights get gradients is learnt once; no way back where memory runs out"
    )
    timeout: Annotated[TimeText, AfterValidator(_at_most_a_day)] = Field(
        Interval(600, "seconds"),
        description="without progress for so long, a run hangs: several are ended, one tells where; 24 h at most",
    )


class LogSection(Section):
    """What is written down."""

    every: PositiveInt | Auto = Field(
        "auto", description="steps a line of metrics.jsonl and a TensorBoard point; auto: 10, at most 4 lines a second"
    )
    tensorboard: bool = Field(True, description="write TensorBoard events")
    report: bool = Field(True, description="write report.html at the end: half a second or more of a processor")


class RunSection(Section):
    """Where it is written."""

    dir: str | None = Field(None, description="the run's directory: the same job started in it again continues it")
    root: str = Field("runs", description="without dir, each start makes a new directory in here")


def _plain_as_text(value: object) -> object:
    """A switch, too, as TOML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int | float) else value


def where_the_key_is(value: str) -> str:
    """A `storage.client_key` as it is.

    Raises:
        ValueError: it names no place.
    """
    if not re.fullmatch(r"(file:(?!.*AGE-SECRET-KEY).+|env:[A-Za-z_]\w*)?", value):
        raise ValueError('it says where the key is, "file:PATH" or "env:VARIABLE", and never holds the key')
    return value


class StorageSection(Section):
    """How object storage is reached, and how what is written there is encrypted."""

    tls: Annotated[Literal["1.3", "1.2"], BeforeValidator(_plain_as_text)] = Field(
        "1.3", description="the oldest version of TLS that a store may speak"
    )
    encryption: Literal["store", "aes256", "kms"] = Field(
        "store", description="by the store, of every object that is written; store: its own way"
    )
    kms_key: str = Field("", description="that the store encrypts with, on AWS its ARN; empty: the account's")
    client_key: Annotated[str, AfterValidator(where_the_key_is)] = Field(
        "", description='where an age key is, "file:PATH" or "env:VARIABLE", that encrypts copies before they leave'
    )


class SlurmSection(Section):
    """On Slurm."""

    partition: str = Field("", description="empty: the default one")
    account: str = Field("", description="empty: the user's own")
    qos: str = Field("", description="quality of service; empty: the default")
    time: Annotated[str, BeforeValidator(str)] = Field(  # 90 is minutes, as for Slurm
        "", pattern=_SLURM_TIME, description='limit of each start, "90", "12:00:00" or "2-00:00:00"; then it goes on'
    )
    notice: TimeText = Field(Interval(120, "seconds"), description="before that limit, to save in")
    containers: Literal["none", "apptainer", "pyxis"] = Field("none", description="what runs launch.image")
    options: list[str] = Field(default_factory=list, description='more of sbatch: ["--constraint=h200"]')


class KubernetesSection(Section):
    """On Kubernetes."""

    context: str = Field("", description="of kubectl's configuration; empty: the current one")
    namespace: NamespaceOrNone = Field("", description="empty: the context's")
    kind: Literal["auto", "job", "jobset", "trainjob"] = Field(
        "auto", description="what it becomes; auto: a Job on one machine, a JobSet on several. trainjob: of Kubeflow"
    )
    claims: dict[Name, str] = Field(
        default_factory=dict,
        description='PersistentVolumeClaims and where they are mounted: { training = "/data" }; the first holds runs',
    )
    directory: str = Field(
        "", description="where paths of the job begin, in the container; empty: where the first claim is mounted"
    )
    service_account: NameOrNone = Field("", description="an existing one; empty: one made for it, no rights")
    queue: NameOrNone = Field("", description="Kueue's LocalQueue; empty: it does not wait in one")
    shm_gib: PositiveInt | Auto = Field(
        "auto", description="shared memory of each machine, part of launch.memory_gib; auto: as much as that"
    )
    node_selector: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, description='labels that machines need: { "nvidia.com/gpu.product" = "NVIDIA-H200" }'
    )
    tolerations: list[Taint] = Field(
        default_factory=list,
        description='taints that machines may have: ["team=a:NoSchedule"]; with GPUs nvidia.com/gpu is one of them',
    )
    resources: dict[DeviceName, PositiveInt] = Field(
        default_factory=dict, description='more of each machine: { "vpc.amazonaws.com/efa" = 4 }'
    )
    secrets: dict[Variable, SecretKey] = Field(
        default_factory=dict, description='variables from secrets: { HF_TOKEN = "hugging-face/token" }'
    )
    pull_secret: NameOrNone = Field("", description="secret that fetches launch.image; empty: none")
    priority: NameOrNone = Field("", description="priority class; empty: the cluster's default")
    grace: TimeText = Field(
        Interval(120, "seconds"), description="from the notice to the end: no less than saving takes"
    )
    deadline: TimeText | None = Field(
        None,
        description="after that it fails, however it stands; on several machines, of each start; without it: never",
    )
    user: Annotated[PositiveInt, Field(lt=2**31)] = Field(
        1000, description="number of the user that it runs as, and of the group of its files"
    )


class RaySection(Section):
    """On Ray."""

    address: str = Field(
        "",
        description="http://HEAD:8265, HEAD:6379, local: one for this job; empty: RAY_ADDRESS, else one that is here",
    )
    max_failures: Annotated[int, Field(strict=True, ge=-1)] = Field(
        3, description="how often the workers are started again after one was lost; -1: always"
    )
    autoscaling: bool = Field(False, description="the cluster grows when asked: more than it has now is no error")
    runtime_env: dict[str, Any] = Field(
        default_factory=dict, description='more of what Ray prepares for the workers: { pip = ["hotloop[train]"] }'
    )


class LaunchSection(Section):
    """Where `hotloop launch` starts it. Each engine restarts it after an interruption, until it has finished."""

    nodes: PositiveInt = Field(1, description="machines")
    gpus: NonNegativeInt | Auto = Field(
        "auto", description="of each machine; auto: ranks.processes, else on this machine all"
    )
    cpus: PositiveInt | Auto = Field("auto", description="processors of each machine; auto: as the engine has it")
    memory_gib: PositiveInt | Auto = Field("auto", description="of each machine; auto: as the engine has it")
    image: str = Field("", description="container image that has hotloop, where the engine runs containers")
    setup: list[str] = Field(default_factory=list, description='shell lines before: ["module load cuda/13"]')
    environment: dict[str, Annotated[str, BeforeValidator(_plain_as_text)]] = Field(
        default_factory=dict, description="variables of the training; no secrets: they would lie in files"
    )
    network: Literal["auto", "infiniband", "ethernet", "efa"] = Field(
        "auto", description="between machines; auto: NCCL's own choice"
    )
    interface: str = Field("", description="of the network: eth0, or ^docker,lo; empty: NCCL's own choice")
    topology_file: str = Field("", description="for NCCL, where machines do not tell how they are built")
    slurm: SlurmSection = Field(default_factory=lambda: SlurmSection())
    kubernetes: KubernetesSection = Field(default_factory=lambda: KubernetesSection())
    ray: RaySection = Field(default_factory=lambda: RaySection())


class Job(Section):
    """One training, as asked for."""

    version: PositiveInt = Field(FORMAT, description="format of this file")
    name: str = Field("job", pattern=r"^[\w.-]+$", max_length=100, description="name of the run's directory")
    seed: Annotated[NonNegativeInt, Field(lt=2**63)] = Field(0, description="seed of weights, order and augmentation")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU if there is one")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "float8"] = Field(
        "auto", description="auto: bf16 on cards that have it, fp16 on older ones, fp32 on a CPU"
    )
    parallel: Literal["auto", "none", "ddp", "fsdp", "tp", "fsdp+tp"] = Field(
        "auto",
        description="several GPUs: a copy of the model on each (ddp), its weights divided (fsdp), its layers (tp), "
        "both (fsdp+tp), or one used (none); auto: ddp if weights, gradients and the optimizer's state fit, else fsdp",
    )
    task: Annotated[
        Annotated[ImagesTask, Tag("images")]
        | Annotated[TokensTask, Tag("tokens")]
        | Annotated[CustomTask, Tag("custom")],
        Discriminator(_task_kind),
    ] = Field(default_factory=lambda: ImagesTask())
    data: DataSection
    model: ModelSection
    train: TrainSection = Field(default_factory=lambda: TrainSection())
    optimizer: OptimizerSection = Field(default_factory=lambda: OptimizerSection())
    schedule: ScheduleSection = Field(default_factory=lambda: ScheduleSection())
    speed: SpeedSection = Field(default_factory=lambda: SpeedSection())
    checkpoint: CheckpointSection = Field(default_factory=lambda: CheckpointSection())
    storage: StorageSection = Field(default_factory=lambda: StorageSection())
    preemption: PreemptionSection = Field(default_factory=lambda: PreemptionSection())
    ranks: RanksSection = Field(default_factory=lambda: RanksSection())
    log: LogSection = Field(default_factory=lambda: LogSection())
    run: RunSection = Field(default_factory=lambda: RunSection())
    launch: LaunchSection = Field(default_factory=lambda: LaunchSection())

    def to_toml(self) -> str:
        """The whole job as TOML, defaults included; keys without a value are left out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))
