"""Images in Parquet files: a column of them, encoded, and one of labels, as data set hubs write them.

The labels are read at once, an image when its turn comes: with the row group that it lies in, as Parquet gives nothing
smaller. So row groups should be small. Of Hugging Face's image data sets one has 100 rows, 12 MB of photographs, and
takes 10 ms.
"""

import json
import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from hotloop.core.errors import DamagedSample, InputError
from hotloop.core.files import state_of

SUFFIX = ".parquet"
_LABELS = ("label", "labels", "class", "cls", "target", "category")
_MOST_BYTES = 256 * 2**20
"""Of images in a row group: reading one image takes as much memory, in each worker."""
_OPEN_FILES = 64


def read_row(path: str, group: int, row: int, name: str) -> bytes:
    """An image's bytes; empty if the row holds none.

    Raises:
        DamagedSample: the row group cannot be read.
    """
    try:
        return _group(os.path.abspath(path), state_of(path), group)[row].as_py() or b""
    except (InputError, IndexError, _arrow_error(), OSError, ValueError) as error:
        raise DamagedSample(name, " ".join(str(error).split())) from None


def require_pyarrow(path: str) -> None:
    """Refuse Parquet where nothing can read it.

    Raises:
        InputError: pyarrow is not installed.
    """
    if find_spec("pyarrow") is None:
        raise InputError(f"{path} is Parquet", "pyarrow is not installed", "pip install 'hotloop[parquet]'")


@lru_cache(maxsize=1)
def _group(path: str, state: str, group: int) -> Any:
    """The images of a row group; the newest is kept, for those who read in order."""
    file = _opened(path, state)
    table = file.file.read_row_group(group, columns=[".".join(file.image)], use_threads=False)
    column = table.column(0).combine_chunks()
    return column.field(file.image[1]) if len(file.image) > 1 else column


class ParquetImages:
    """A Parquet file whose columns are known.

    Attributes:
        image: the path of the column of images: its name, and "bytes" if that is a part of it.
        label: the name of the column of labels.
        classes: names of the classes that labels count into, if the file tells them.

    Raises:
        InputError: the file cannot be read, or its columns are not clear.
    """

    def __init__(self, path: str) -> None:
        from pyarrow import parquet

        self.path = path
        try:
            self.file = parquet.ParquetFile(path)
        except (_arrow_error(), OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        self.metadata = self.file.metadata
        schema = self.file.schema_arrow
        self.image = self._image_column(schema)
        self.label = self._label_column(schema)
        names = _class_labels(schema.metadata or {}).get(self.label, ())
        self.classes = names if _is_number(schema.field(self.label).type) else ()

    def check_row_groups(self) -> None:
        """Refuse row groups that are too large to read one for an image.

        Raises:
            InputError: one is.
        """
        path = self.path
        largest = max((self.group_bytes(group) for group in range(self.metadata.num_row_groups)), default=0)
        if largest > _MOST_BYTES:
            raise InputError(
                f"{path} has row groups of {largest / 2**20:,.0f} MiB of images; {_MOST_BYTES // 2**20} MiB may be",
                "an image is read with all of its row group, by each worker",
                "write it with smaller ones: pyarrow.parquet.write_table(..., row_group_size=100)",
            )

    def labels(self) -> tuple[list[str], bool]:
        """The label of each row, and whether they are numbers without names.

        Raises:
            InputError: a row has none, or a number that means no class.
        """
        try:
            values = self.file.read(columns=[self.label]).column(0).to_pylist()
        except (_arrow_error(), OSError, ValueError) as error:
            raise _unreadable(self.path, error) from None
        for row, value in enumerate(values):
            number = isinstance(value, int)
            known = not number or (value >= 0 and (not self.classes or value < len(self.classes)))
            if value is None or value == "" or not known:
                what = f'{self.path}: {self.label} of row {row} is "{"" if value is None else value}"'
                classes = f"the classes are 0 to {len(self.classes) - 1}" if self.classes else "classes count from 0"
                among = classes if number else "each image needs a class"
                raise InputError(what, among, "remove the row, or give it its label")
        if self.classes:
            return [self.classes[value] for value in values], False
        are_numbers = all(isinstance(value, int) for value in values)  # true is 1
        return [str(int(value) if are_numbers else value) for value in values], are_numbers

    def group_bytes(self, group: int) -> int:
        """Of the images of a row group, decompressed."""
        columns = self.metadata.row_group(group)
        found = [columns.column(number) for number in range(columns.num_columns)]
        own = [one for one in found if one.path_in_schema == ".".join(self.image)]
        return int(sum(one.total_uncompressed_size for one in own))

    def _image_column(self, schema: Any) -> tuple[str, ...]:
        from pyarrow import types

        def is_bytes(kind: Any) -> bool:
            return bool(types.is_binary(kind) or types.is_large_binary(kind))

        found: list[tuple[str, ...]] = []
        for field in schema:
            if is_bytes(field.type):
                found.append((field.name,))
            elif types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
                found += [(field.name, "bytes")] if is_bytes(field.type.field("bytes").type) else []
        if len(found) != 1:
            raise self._unclear(
                schema, "column of images", "bytes, or a struct with bytes", [name[0] for name in found]
            )
        return found[0]

    def _label_column(self, schema: Any) -> str:
        told = _class_labels(schema.metadata or {})
        found = [each.name for each in schema if each.name.lower() in _LABELS]
        found = found or [each.name for each in schema if each.name in told]
        if len(found) != 1:
            raise self._unclear(schema, "column of labels", f"numbers or texts, named {_LABELS[0]}", found)
        kind = schema.field(found[0]).type
        if not (_is_number(kind) or _is_text(kind)):
            what = f"{self.path}: the column {found[0]} is of type {kind}"
            raise InputError(what, "labels are whole numbers, texts, or true and false", "write it as one of those")
        return str(found[0])

    def _unclear(self, schema: Any, what: str, kind: str, found: list[str]) -> InputError:
        several = f"{', '.join(found)} could be" if found else "none of them is"
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        return InputError(
            f"{self.path} has no clear {what}", f"its columns are {columns}: {several}", f"leave one column of {kind}"
        )


def opened(path: str) -> ParquetImages:
    """A Parquet file as it is now; some stay open.

    Raises:
        InputError: see `ParquetImages`.
    """
    return _opened(os.path.abspath(path), state_of(path))


@lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str, state: str) -> ParquetImages:
    return ParquetImages(path)


def _arrow_error() -> type[Exception]:
    """What pyarrow raises on damaged files, beside Python's own errors."""
    import pyarrow

    kind: type[Exception] = pyarrow.ArrowException
    return kind


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_boolean(kind))


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _class_labels(metadata: dict[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """The names of the classes of columns, as Hugging Face's ClassLabel writes them into a file."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        named = {column: feature["names"] for column, feature in features.items() if "names" in feature}
        found = {column: tuple(str(name) for name in names) for column, names in named.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}
    return {column: names for column, names in found.items() if len(set(names)) == len(names)}


def _unreadable(path: str, error: Exception) -> InputError:
    return InputError(f"{path} cannot be read", " ".join(str(error).split()), "fetch or write it again")
