"""hotloop's parts in a loop of one's own: data, step, checkpoints, and stopping when asked."""

import sys
from pathlib import Path

import hotloop
from hotloop.data.image_list import find_images
from hotloop.data.images import CenterCrop, ImageFiles, RandomCrop


def main(images: str, checkpoints: str) -> None:
    # torch is imported here, not above: the data workers import this file, and need none.
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    torch.manual_seed(0)
    files = find_images(f"{images}/train")
    train = ImageFiles(files, 32, RandomCrop((0.6, 1.0), (0.85, 1.18), flip=0.0), max_pixels=10**8)
    val = ImageFiles(find_images(f"{images}/val", files.classes), 32, CenterCrop(1.0), max_pixels=10**8)

    def tensors(batch: hotloop.Batch) -> tuple[Tensor, Tensor]:
        pixels_BHWC = torch.from_numpy(batch.arrays["images"])
        return pixels_BHWC.permute(0, 3, 1, 2).float() / 255, torch.from_numpy(batch.arrays["labels"])

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    model = nn.Sequential(
        nn.Conv2d(3, 32, 5, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 25, len(files.classes)),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = hotloop.Step(model, loss, optimizer, settings=hotloop.StepSettings(clip_norm=1.0))

    checkpointer = hotloop.Checkpointer(Path(checkpoints), warn=print)
    epoch = 0
    if loaded := checkpointer.latest():
        step.load_state_dict(loaded.state["step"])
        epoch = loaded.state["epoch"]

    settings = hotloop.LoaderSettings(batch_size=64), hotloop.LoaderSettings(batch_size=128, shuffle=False)
    with hotloop.Preemption() as preemption, hotloop.Loaders([(train, settings[0]), (val, settings[1])], 1) as loaders:
        while epoch < 6 and not preemption.requested:
            for batch in loaders[0].batches(epoch):
                step(tensors(batch))
            epoch += 1
            checkpointer.save({"step": step.state_dict(), "epoch": epoch}, step.number, epoch)
            with torch.inference_mode():
                right = sum(
                    int((model(pixels).argmax(1) == labels).sum())
                    for pixels, labels in map(tensors, loaders[1].batches())
                )
            print(f"epoch {epoch}: {right / len(val):.3f} of {len(val)} right")


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    main(sys.argv[1], sys.argv[2])
