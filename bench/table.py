"""Write the README's table of figures from `results/*.json`; `--check` says whether it is up to date."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from record import RESULTS

from hotloop.core.units import count

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures: made by bench/table.py -->\n", "<!-- end of figures -->\n"


def spread(rate: dict[str, Any], unit: str) -> str:
    """A rate with its spread."""
    return f"{rate['median']:,.0f} {unit} ({rate['low']:,.0f} to {rate['high']:,.0f}), n = {rate['n']}"


def demo_epoch(result: dict[str, Any]) -> tuple[str, str]:
    ours, rival = result["epoch_seconds"]["hotloop"], result["epoch_seconds"][result["best_rival"]]
    text = (
        f"{ours['median']:.2f} s ({ours['low']:.2f} to {ours['high']:.2f}) against {rival['median']:.2f} s "
        f"({rival['low']:.2f} to {rival['high']:.2f}): **{1 / result['ratio']:.2f} ×**, n = {ours['n']} each"
    )
    return "an epoch of the demo, against a plain DataLoader loop at its best number of workers", text


def help_time(result: dict[str, Any]) -> tuple[str, str]:
    seconds = result["seconds"]
    return (
        "`hotloop --help`",
        f"{seconds['median']:.3f} s ({seconds['low']:.3f} to {seconds['high']:.3f}), n = {seconds['n']}",
    )


def launch_time(result: dict[str, Any]) -> tuple[str, str]:
    each = [
        f"{case} {seconds['median']:.2f} s ({seconds['low']:.2f} to {seconds['high']:.2f})"
        for case, seconds in result["seconds"].items()
    ]
    number = next(iter(result["seconds"].values()))["n"]
    return "`hotloop launch`: to hand a job over", f"{'; '.join(each)}, n = {number} each"


def faults(result: dict[str, Any]) -> tuple[str, str]:
    kinds = ", ".join(f"{counts['trials']} {kind}" for kind, counts in result["kinds"].items())
    return (
        f"{result['trials']} runs of one to four processes disturbed at a random moment ({kinds}) and started again: "
        "weights bit for bit",
        f"**{result['lost']} lost**, {result['mismatches']} that differ, {result['hangs']} hangs, "
        f"{result['accepted']} damaged checkpoints continued, {count(result['errors'], 'other error')}",
    )


def contention(result: dict[str, Any]) -> tuple[str, str]:
    speeds = result["samples_per_second"]
    text = "{median:.0f} samples/s ({low:.0f} to {high:.0f}) each".format(**speeds["brief"])
    text += " against {median:.0f} ({low:.0f} to {high:.0f})".format(**speeds["default"])
    return "two CPU trainings on one machine, against OpenMP's default", f"{text}: **{result['ratio']:.1f} ×**"


def demo_gpu(result: dict[str, Any]) -> tuple[str, str]:
    accuracy = result["val_accuracy"]
    return (
        "the demo on a GPU: validation accuracy",
        f"{accuracy['median']:.4f} ({accuracy['low']:.4f} to {accuracy['high']:.4f}), n = {accuracy['n']}",
    )


def loop_cost(result: dict[str, Any]) -> tuple[str, str]:
    rates = result["steps_per_second"]
    ours, plain = rates["hotloop, compiled"], rates["hotloop"]
    rivals = {name: ours["median"] / rates[name]["median"] for name in rates if not name.startswith("hotloop")}
    names = {"raw graph": "a hand-captured CUDA graph", "raw eager": "raw PyTorch", "accelerate": "Accelerate"}
    against = ", ".join(f"**{ratio:.1f} ×** {names.get(name, 'Lightning')}" for name, ratio in rivals.items())
    text = f"{spread(ours, 'steps/s')}: {against}; not compiled {plain['median']:,.0f}"
    return "a small network, batch 64, through the whole training loop, compiled", text


def step_resnet50(result: dict[str, Any]) -> tuple[str, str]:
    speed, ratios = result["figures"]["hotloop"]["samples_per_second"], result["ratios"]
    text = (
        f"{spread(speed, 'images/s')}: **{ratios['compiled']:.2f} ×** a hand-written bf16 channels_last compiled loop, "
        f"**{ratios['fp16 guide']:.2f} ×** fp16 autocast, **{ratios['defaults']:.2f} ×** PyTorch's defaults"
    )
    return "ResNet-50, 224 pixels, batch 256, data on the GPU", text


def step_cifar(result: dict[str, Any]) -> tuple[str, str]:
    seconds = result["epoch_seconds"]
    each = [
        f"{seconds[batch]['median']:.3f} s with batches of {batch}, **{result['ratios'][batch]:.2f} ×**"
        for batch in ("512", "1024")
    ]
    text = f'{"; ".join(each)} a hand-written loop in "reduce-overhead" mode'
    return "ResNet-50 on 50,000 images of 32 × 32, an epoch with augmentation and shuffling", text


def step_resnet152(result: dict[str, Any]) -> tuple[str, str]:
    speed, ratio = result["figures"]["hotloop"]["samples_per_second"], result["ratios"]["defaults"]
    text = (
        f"{spread(speed, 'images/s')}: "
        f"**{ratio:.2f} ×** PyTorch's defaults, with {result['memory_ratio']:.2f} of their memory"
    )
    return "ResNet-152, 224 pixels, batch 128", text


def step_small(result: dict[str, Any]) -> tuple[str, str]:
    ours, ratio = result["hotloop"], result["ratios"]["by hand"]
    text = f"{ours['median']:.3f} s, n = {ours['n']}: **{ratio:.2f} ×** a graph captured by hand"
    return "a narrow network on the same images, batch 1,024, an epoch", text


def gpt2(result: dict[str, Any]) -> tuple[str, str]:
    speed, same = result["figures"]["hotloop"]["samples_per_second"], result["ratios"]["compiled, our model"]
    text = (
        f"{spread(speed, 'tokens/s')}: "
        f"**{result['ratios']['compiled']:.2f} ×** a hand-written bf16 compiled loop, {same:.2f} × that loop over our "
        "model, which adds its blocks up in bf16"
    )
    return "GPT-2 124M, 1,024 tokens, batch 32", text


def step_second_start(result: dict[str, Any]) -> tuple[str, str]:
    cold, warm = (result["first_step_seconds"][name] for name in ("cold", "warm"))
    text = f"{warm['median']:.1f} s against {cold['median']:.1f} s: **{result['ratio']:.2f}**, n = {warm['n']} each"
    return "the first step of a compiled ResNet-50, at its second start against its first", text


def two_cards(result: dict[str, Any]) -> tuple[str, str]:
    small, large = result["layers"]["ratios"], result["resnet50"]["ratios"]
    speed = result["resnet50"]["figures"]["hotloop"]["samples_per_second"]
    text = (
        f"{spread(speed, 'images/s')}: **{large['DDP, compiled']:.2f} ×** DistributedDataParallel compiled by hand, "
        f"{large['DDP']:.2f} × uncompiled; three small layers **{small['DDP']:.1f} ×**"
    )
    return f"ResNet-50, 224 pixels, batch 128 on each of {result['ranks']} GPUs", text


def scaling(result: dict[str, Any]) -> tuple[str, str]:
    shares, speed = result["scaling"], result["images_per_second"][str(result["ranks"])]
    text = f"{spread(speed, 'images/s')}: **{shares['hotloop']:.3f}** of so many times one GPU"
    if "hotloop, slowest card" in shares:
        text += f", {shares['hotloop, slowest card']:.3f} of the slowest one"
    if "hotloop, gradients as bfloat16" in shares:
        text += f"; gradients as bfloat16 {shares['hotloop, gradients as bfloat16']:.3f}"
    if "hotloop, static graph" in shares:
        text += f"; DDP's static graph {shares['hotloop, static graph']:.3f}"
    if "by hand" in shares:
        text += f"; compiled DistributedDataParallel by hand {shares['by hand']:.3f}"
    if "JPEG files" in shares:
        text += f"; from JPEG files {shares['JPEG files']:.3f} of the speed with data on the GPUs"
    return f"ResNet-50, 224 pixels, bf16, batch 256 on each of {result['ranks']} GPUs", text


def llama(result: dict[str, Any]) -> tuple[str, str]:
    text = f"{spread(result['hotloop'], 'tokens/s/GPU')}: **{result['ratio']:.3f} ×** compiled FSDP2 blocks by hand"
    if "float8" in result:
        text += f"; float8 {result['hotloop, float8']['median']:,.0f}, **{result['float8']:.2f} ×** that"
    return f"Llama 3 8B's shapes, {result['layers']} layers, 8,192 tokens on each GPU, AdamW", text


def checkpoint_stall(result: dict[str, Any]) -> tuple[str, str]:
    stall, share = result["stall"], result["speed_with_saves"]
    text = (
        f"waits {stall['median']:.2f} s ({stall['low']:.2f} to {stall['high']:.2f}), n = {stall['n']}; "
        f"**{share['median']:.3f}** of the speed without, with a save every {result['every']} steps"
    )
    return f"the same shapes, {result['layers']} layers: a checkpoint with Adam's state, beside the training", text


def jpeg_to_gpu(result: dict[str, Any]) -> tuple[str, str]:
    numbers = [number for number in ("16", "8", "4") if number in result]
    shares = ", ".join(f"{result[number]['ratios']['data on the GPU']:.3f} with {number}" for number in numbers)
    rivals = {
        kind: [ratio for name, ratio in result["16"]["ratios"].items() if name.startswith(kind)]
        for kind in ("DataLoader", "DALI")
    }
    than = ", ".join(f"**{min(ratios):.2f} ×** the better {kind}" for kind, ratios in rivals.items() if ratios)
    ours = spread(result["16"]["images_per_second"]["hotloop"], "images/s")
    text = (
        f"{ours} with 16 processors: {than}, with a compiled loop; of the speed with data on the GPU **{shares}** "
        "processors"
    )
    return "ResNet-50, 224 pixels, batch 256, from 8,192 JPEG files of 123 KiB", text


def decode_cpu(result: dict[str, Any]) -> tuple[str, str]:
    each, ratios = result["images_per_second_and_core"], result["ratios"]
    text = (
        f"{spread(each['hotloop'], 'images/s a core')}: **{ratios['hotloop']:.2f} ×** a DataLoader "
        f"over {result['best_rival']}'s decoder; {ratios['hotloop, for a GPU']:.2f} × where a GPU resizes them"
    )
    return "photographs of 123 KiB to crops of 224 pixels, by processors alone", text


def first_batch(result: dict[str, Any]) -> tuple[str, str]:
    seconds = result["seconds"]
    text = (
        f"{seconds['median']:.2f} s ({seconds['low']:.2f} to {seconds['high']:.2f}), n = {seconds['n']}; "
        f"{result['without_index_seconds']:.1f} s without an index"
    )
    return f"from a start to the first batch of a folder with {result['images']:,} images, torch not counted", text


def long_run(result: dict[str, Any]) -> tuple[str, str]:
    growth, last = result["growth"], result["last"]
    memory = f"{growth['own_bytes'] / 2**20:.2f} MiB of {last['own_bytes'] / 2**20:.0f}"
    text = f"{memory}, {growth['open_files']:.0f} handles, {growth['threads']:.0f} threads"
    return f"growth of the pipeline over {result['batches']:,} batches, two hours' worth of a ResNet-50", text


def any_script(result: dict[str, Any]) -> tuple[str, str]:
    scripts = result["scripts"].values()
    verdicts = [verdict == one["expected"]["verdict"] for one in scripts for verdict in one["verdicts"]]
    errors = [one["error"] for one in scripts if one["error"] is not None]
    close = sum(error <= result["goals"]["error"] for error in errors)
    costs = [one["overhead_ratio"]["median"] for one in scripts]
    times = sorted({len(one["verdicts"]) for one in scripts})
    often = f"{times[0]} × " if len(times) == 1 else f"{times[0]} to {times[-1]} × "
    text = (
        f"{sum(verdicts)} of {len(verdicts)} verdicts right; the step after mending predicted within 10 % of a step "
        f"for {close} of {len(errors)}, within {max(errors):.0%} for all; watching costs at most {max(costs):.1%}"
    )
    return f"`hotloop profile` on {often}{len(scripts)} scripts with a known bottleneck", text


def imagenet_run(result: dict[str, Any]) -> tuple[str, str]:
    seconds, plain, cached = result["step_seconds"]["exact"], result["exact_over_plain"], result["exact_of_cached"]
    text = (
        f"{1000 * seconds['median']:.0f} ms a step at level exact, n = {seconds['n']}: **{plain:.2f} ×** the script "
        f"alone, {cached:.3f} of its speed with its batch on the GPU"
    )
    if "fast_over_plain" in result:
        text += f"; at level fast **{result['fast_over_plain']:.2f} ×**"
    return "`hotloop run` on pytorch/examples' imagenet/main.py, ResNet-50, JPEG files, untouched", text


def explain(result: dict[str, Any]) -> tuple[str, str]:
    logs = sum(part["logs"] for part in result["parts"].values())
    large, blind = result["large"], result["unseen_when_first_scored"]
    unread = f"{blind['right'] / blind['logs']:.1%} of the {blind['logs']} among them that nobody had read"
    text = (
        f"{result['top1']:.1%} of {logs} logs; {unread}, when they were first scored; "
        f"{large['bytes'] / 1e9:.0f} GB in {large['seconds']:.0f} s"
    )
    return "`hotloop explain`: the first cause is the one named", text


def doctor_deep(result: dict[str, Any]) -> tuple[str, str]:
    shares = [share for name, share in result["of_by_hand"].items() if "pageable" not in name]
    shares += [turns["of_by_hand"] for turns in result["pageable_in_turns"].values()]
    warnings = sum(one["level"] != "note" for one in result["findings"])
    text = (
        f"{result['seconds']:.0f} s for {count(result['gpus'], 'GPU')}; rates {min(shares):.2f} to {max(shares):.2f} "
        f"of those measured by hand; {warnings} findings on a healthy machine"
    )
    return "`hotloop doctor --deep`: kernels, matrices, copies, links, disks", text


def live_cost(result: dict[str, Any]) -> tuple[str, str]:
    share = result["share_of_step"]
    text = f"{share['median']:.3%} ({share['low']:.3%} to {share['high']:.3%}) of a step of 5 ms, n = {share['n']}"
    return "what being watched costs a training", text


def exporter(result: dict[str, Any]) -> tuple[str, str]:
    ours = result["hotloop"]
    rival = next((name for name in result if name.startswith("nvitop-exporter")), "")
    text = (
        f"{1000 * ours['cpu_seconds_each']['median']:.1f} ms of CPU, "
        f"{1000 * ours['wall_seconds_each']['median']:.1f} ms by the clock, n = {ours['cpu_seconds_each']['n']}, "
        f"{ours['resident_bytes'] / 1e6:.0f} MB"
    )
    if rival:
        text += (
            f"; {rival}, which knows no jobs, {1000 * result[rival]['cpu_seconds_each']['median']:.1f} ms and "
            f"{1000 * result[rival]['wall_seconds_each']['median']:.1f} ms, "
            f"{result[rival]['resident_bytes'] / 1e6:.0f} MB"
        )
    return "`hotloop exporter`: a scrape a second of 8 pretended cards and 8 jobs", text


def tune(result: dict[str, Any]) -> tuple[str, str]:
    text = (
        f"{result['from_best']:.1%} from the best of {result['combinations']}, at {result['cost']:.0%} of a grid's cost"
    )
    return "`hotloop tune` on the demo's settings", text


def plan_accuracy(result: dict[str, Any]) -> tuple[str, str]:
    known, unseen = (result["off"].get(key) for key in ("constants from these", "not seen before"))
    found = unseen or known
    text = "memory off by {memory_median:.1%} (median) and {memory_worst:.1%} (worst), time by {time_median:.1%} and "
    text = (text + "{time_worst:.1%}, n = {n}").format(**found)
    note = "" if unseen else "; its constants are from these same steps"
    return "`hotloop plan` against steps that were recorded on an H100 and an H200", text + note


def plan_time(result: dict[str, Any]) -> tuple[str, str]:
    cases = result["cases"]
    texts = [f"{one['seconds']['median']:.1f} s for a {name.split(',')[0]} training" for name, one in cases.items()]
    most = max(one["memory_gb"] for one in cases.values())
    return "`hotloop plan` for an 8B model, as a whole process", f"{', '.join(texts)}; {most:.1f} GB"


def spot(result: dict[str, Any]) -> tuple[str, str]:
    found = result["summary"]
    text = (
        f"waste off by {found['off_median']:.0%} in the median ({found['off_on_seen_median']:.0%} on the half that was "
        f"seen), {found['less_waste_than_young_mean']:.1%} less waste than Young's interval on average, more in "
        f"{len(found['worse_than_young'])} of {found['n']}"
    )
    return f"`hotloop plan spot` on the second halves of {found['traces']} public traces, planned from the first", text


def export(result: dict[str, Any]) -> tuple[str, str]:
    models = {name: found for name, found in result.items() if isinstance(found, dict) and "batch_1" in found}
    times = [found[batch]["times_as_fast"] for found in models.values() for batch in found if batch.startswith("batch")]
    least, most = (choose(one["median"] for one in times) for choose in (min, max))
    worst = max(found["max_abs_error"] for found in models.values())
    text = f"**{least:.2f} × to {most:.2f} ×** PyTorch's eager speed for batches of 1, 8 and 32, n = {times[0]['n']}"
    return f"exported to ONNX: {', '.join(models)} in onnxruntime", f"{text}; outputs differ by {worst:.1e} at most"


ROWS = {
    "loop_cost": loop_cost,
    "step_resnet50": step_resnet50,
    "jpeg_to_gpu": jpeg_to_gpu,
    "step_resnet152": step_resnet152,
    "step_cifar": step_cifar,
    "step_small": step_small,
    "step_second_start": step_second_start,
    "gpt2": gpt2,
    "two_cards": two_cards,
    "scaling": scaling,
    "scaling_h100": scaling,
    "llama": llama,
    "checkpoint_stall": checkpoint_stall,
    "imagenet_run": imagenet_run,
    "any_script_cuda": any_script,
    "any_script_cpu": any_script,
    "tune_cuda": tune,
    "tune_cpu": tune,
    "doctor_deep": doctor_deep,
    "live_cost": live_cost,
    "plan_accuracy": plan_accuracy,
    "plan_time": plan_time,
    "spot": spot,
    "export": export,
    "exporter": exporter,
    "explain": explain,
    "demo_epoch": demo_epoch,
    "decode_cpu": decode_cpu,
    "first_batch": first_batch,
    "long_run": long_run,
    "contention": contention,
    "faults": faults,
    "help_time": help_time,
    "launch_time": launch_time,
    "demo_gpu": demo_gpu,
}


def where(result: dict[str, Any]) -> str:
    """The card, how many of them were used, and versions; the processor where no GPU was."""
    machine, ranks = result["machine"], result.get("ranks", 1)
    names = [gpu["name"] for gpu in machine["gpus"]]
    several = f"{ranks} × " if ranks > 1 else ""
    device = several + names[0] if names else f"{machine['cpus']} cores, {machine['processor']}"
    return f"{device}; torch {machine['packages'].get('torch', '-')}, Python {machine['python']}"


def table() -> str:
    """The table as Markdown."""
    lines = ["| what | measured | on |", "|---|---|---|"]
    for name, row in ROWS.items():
        file = RESULTS / f"{name}.json"
        if file.exists():
            result = json.loads(file.read_text())
            lines.append(f"| {' | '.join([*row(result), where(result)])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = README.read_text()
    before, rest = text.split(BEGIN)
    new = before + BEGIN + table() + END + rest.split(END)[1]
    if check and new != text:
        sys.exit("README.md is not what bench/results hold. Fix: python bench/table.py")
    README.write_text(new)


if __name__ == "__main__":
    main()
