"""`hotloop run` on scripts that train with TensorFlow."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from hotloop.accelerate.tensorflow_runner import policy_for

pytestmark = pytest.mark.skipif(not find_spec("tensorflow"), reason="tensorflow is not installed")

QUIET = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": ""}

SCRIPT = """
import json, os, sys
import tensorflow as tf

tf.keras.utils.set_random_seed(1)
names = sorted(tf.io.gfile.glob("numbers/*"))
calls = []

def read(name):
    numbers = tf.reshape(tf.io.decode_raw(tf.io.read_file(name), tf.float32), [16])
    return numbers, tf.cast(tf.reduce_sum(numbers) > 0, tf.int32)

def double(numbers, label):
    return 2 * numbers, label

def disturb(numbers, label):
    return numbers + tf.random.normal([16], stddev=0.1), label

def note(numbers, label):
    calls.append(int(label))
    return numbers

data = tf.data.Dataset.from_tensor_slices(names).map(read).map(double)
train = data.shuffle(64, seed=3).map(disturb).batch(8)
model = tf.keras.Sequential([tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(2)])
model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
losses = []
for epoch in range(3):
    losses += model.fit(train, verbose=0).history["loss"]
    if "remove" in sys.argv and epoch == 0:
        [os.remove(name) for name in names]
own = [x.numpy().sum().item() for x in data.map(lambda x, y: tf.numpy_function(note, [x, y], tf.float32)).batch(4)]
print(json.dumps([losses, own, calls]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "numbers"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(40):
        (folder / f"{number:02d}").write_bytes(random.standard_normal(16, np.float32).tobytes())
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def called(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=QUIET, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_script_sees_the_same_and_reads_its_files_once(script: Path) -> None:
    plain = called(script, "train.py")
    options = ["--json-summary", "summary.json", "--", sys.executable, "train.py", "remove"]
    accelerated = called(script, "-m", "hotloop", "run", *options)
    assert json.loads(accelerated) == json.loads(plain), "random numbers and the order of Python's calls too"
    summary = json.loads((script / "summary.json").read_text())
    found = {one["name"]: (one["state"], one["count"]) for one in summary["accelerations"]}
    assert found["memory_growth"] == ("unfit", 0)
    assert found["tf_cache"] == ("on", 1), "behind the last map that draws nothing"
    assert found["tf_data"][0] == "on"
    assert "2 maps of random numbers or Python: called in order, as before" in summary["notes"]
    assert "tf32" not in found


HELPED = """
import hotloop.tensorflow
first = hotloop.tensorflow.accelerate()
helped = hotloop.tensorflow.accelerate(without=["memory_growth"])  # as when a cell of a notebook is run again
{script}
helped.stop()
later = tf.data.Dataset.from_tensor_slices(names).map(read)
print(json.dumps([[one.name, one.state, one.count] for one in helped.told]))
"""


@pytest.mark.slow
def test_code_of_ones_own_asks_for_the_same_by_a_call(script: Path) -> None:
    plain = called(script, "train.py")
    (script / "helped.py").write_text(HELPED.format(script=SCRIPT))
    losses, told = called(script, "helped.py", "remove").splitlines()
    assert json.loads(losses) == json.loads(plain), "random numbers and the order of Python's calls too"
    assert json.loads(told) == [["tf_data", "on", 2], ["tf_cache", "on", 1]], "none of what is made after stop()"
    done = subprocess.run(
        [sys.executable, "-c", "import hotloop.tensorflow as t; t.accelerate(only=['tf_dada'])"],
        env=QUIET, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert "tf_dada: no such acceleration" in done.stderr


PIPELINES = """
import tensorflow as tf
from hotloop.accelerate.tensorflow_data import Pipelines

Range = tf.data.Dataset.range
size = 100 * (8 + 256)

def in_turn(x):  # the first of each eight takes longest
    return tf.while_loop(lambda i, y: i < (8 - x % 8) * 3000, lambda i, y: (i + 1, y), (tf.constant(0, tf.int64), x))[1]

for room in (0, size - 1, size):
    pipelines = Pipelines(tf, True, room)
    pipelines.install()
    data = Range(100).map(map_func=lambda x: x + 1)
    unknown = Range(100).filter(lambda x: x > 3).map(lambda x: x + 1)
    sequential = Range(100).map(lambda x: x + 1, num_parallel_calls=1)
    nested = Range(3).flat_map(lambda x: Range(3).map(lambda y: x + y))
    loose = tf.data.Options()
    loose.deterministic = False
    ordered = Range(24).repeat().map(in_turn).take(24).with_options(loose)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    looked_up = Range(2).map(lambda x: tf.reshape(table.lookup(x), []))
    before = list(looked_up.as_numpy_iterator())
    table.insert(Range(2).batch(2).get_single_element(), [5, 6])
    assert (before, list(looked_up.as_numpy_iterator())) == ([-1, -1], [5, 6])
    assert list(data.as_numpy_iterator()) == list(range(1, 101))
    assert list(ordered.as_numpy_iterator()) == list(range(24))
    assert list(nested.as_numpy_iterator()) == [0, 1, 2, 1, 2, 3, 2, 3, 4]
    assert len(list(unknown)) == 96
    pipelines.remove()
    print(pipelines.mapped, pipelines.left, pipelines.cached, pipelines.cache_bytes == room % size)
policies = [tf.keras.mixed_precision.Policy(name).compute_dtype for name in ("mixed_bfloat16", "mixed_float16")]
print(policies)
"""


@pytest.mark.slow
def test_elements_and_their_order_stay_and_only_what_has_room_is_kept(tmp_path: Path) -> None:
    (tmp_path / "pipelines.py").write_text(PIPELINES)
    found = called(tmp_path, "pipelines.py").splitlines()
    assert found == ["3 1 0 True", "3 1 0 True", "3 1 1 True", "['bfloat16', 'float16']"]


def test_sixteen_bits_are_those_that_the_card_has() -> None:
    cards = [(6, 1), (7, 5), (8, 0), (9, 0)]
    assert [policy_for(card) for card in cards] == ["", "mixed_float16", "mixed_bfloat16", "mixed_bfloat16"]


def test_events_are_written_without_it(tmp_path: Path) -> None:
    """Importing it takes longer than a small training."""
    code = """
import sys
from pathlib import Path
from hotloop.core.tensorboard import without_tensorflow
without_tensorflow()
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter("events") as writer:
    writer.add_scalar("loss", 1.5, 3)
print("tensorflow" in sys.modules, len(list(Path("events").iterdir())))
"""
    assert called(tmp_path, "-c", code) == "False 1\n"
