"""Write scikit-learn's 1,797 handwritten digits as JPEG files into class folders, split into train and val.

The split is fixed: every fifth image of each class, in the data set's own order, is for validation.
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where train/ and val/ go")
    folder = parser.parse_args().folder
    digits = load_digits()
    seen: Counter[int] = Counter()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if seen[label] % 5 == 4 else "train"
        seen[label] += 1
        file = folder / split / str(label) / f"{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        grey = Image.fromarray((pixels * (255 / 16)).astype(np.uint8))
        grey.resize((64, 64), Image.Resampling.BICUBIC).convert("RGB").save(file, quality=90)
    print(f"{len(digits.target):,} images in {folder}")


if __name__ == "__main__":
    main()
