"""Real text without a download: Python's own library, as bytes. Writes train.npy and val.npy into a folder."""

import sys
import sysconfig
from pathlib import Path

import numpy as np


def main(folder: str) -> None:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
    cut = len(tokens) * 9 // 10
    Path(folder).mkdir(parents=True, exist_ok=True)
    np.save(Path(folder) / "train.npy", tokens[:cut])
    np.save(Path(folder) / "val.npy", tokens[cut:])
    print(f"{cut:,} tokens to train on, {len(tokens) - cut:,} to validate on, of {len(sources)} files")


if __name__ == "__main__":
    main(sys.argv[1])
