"""Known vulnerabilities, newer patches, bills of materials."""

import functools
import http.server
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from hotloop.core.errors import HotloopError, InputError
from hotloop.image.advisories import affecting, is_affected, refresh
from hotloop.image.lock import Locked
from hotloop.image.outdated import newer_patches, plan
from hotloop.image.sbom import sbom
from hotloop.versions.table import shipped_table

TABLE = shipped_table()


def record(name: str, *events: dict[str, str], **more: Any) -> dict[str, Any]:
    affected = {
        "package": {"ecosystem": "PyPI", "name": name},
        "ranges": [{"type": "ECOSYSTEM", "events": list(events)}],
    }
    return {"id": f"TEST-{name}", "summary": f"{name} is open", "affected": [affected], **more}


def database(folder: Path, *records: dict[str, Any]) -> Path:
    file = folder / "all.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for number, one in enumerate(records):
            archive.writestr(f"TEST-{number}.json", json.dumps(one))
    return file


PACKAGES = (Locked("Pillow", "11.0.0", ()), Locked("numpy", "2.4.6", ()), Locked("torch", "2.14.0", ()))


def test_advisories_about_the_versions_that_are_there(tmp_path: Path) -> None:
    file = database(
        tmp_path,
        record("pillow", {"introduced": "0"}, {"fixed": "11.0.1"}, aliases=["CVE-1"]),
        record("numpy", {"introduced": "0"}, {"fixed": "2.0"}),
        record("torch", {"introduced": "2.0"}),
        record("requests", {"introduced": "0"}),
        record("numpy", {"introduced": "0"}, withdrawn="2026-01-01T00:00:00Z"),
    )
    found = affecting(PACKAGES, file)
    assert [(one.package, one.fixed, one.aliases) for one in found] == [
        ("Pillow", "11.0.1", ("CVE-1",)),
        ("torch", "", ()),
    ]
    lines = tmp_path / "osv.jsonl"
    lines.write_text("\n".join(json.dumps(record("torch", {"introduced": "0"})) for _ in range(2)))
    assert [one.id for one in affecting(PACKAGES, lines)] == ["TEST-torch"]


versions = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda pair: f"{pair[0]}.{pair[1]}")


@given(st.lists(versions, min_size=1, max_size=6, unique=True), versions, st.booleans())
def test_ranges_are_read_as_osv_means_them(bounds: list[str], own: str, inclusive: bool) -> None:
    ordered = sorted(bounds, key=Version)
    kinds = ["introduced", "last_affected" if inclusive else "fixed"]
    events = [{kinds[number % 2]: bound} for number, bound in enumerate(ordered)]
    expected = False
    for first, last in zip(ordered[::2], [*ordered[1::2], "999"], strict=False):
        below = Version(own) <= Version(last) if inclusive else Version(own) < Version(last)
        expected = expected or (Version(first) <= Version(own) and below)
    for mixed in (events, events[::-1]):
        assert is_affected(own, {"ranges": [{"type": "ECOSYSTEM", "events": mixed}]}) == expected


def test_versions_that_are_listed_are_affected_and_commits_are_not_versions() -> None:
    assert is_affected("1.0", {"versions": ["1.0"]})
    assert not is_affected("1.0", {"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]})
    assert is_affected("1.0", {"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.0"}]}]})


@contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """No line for each request."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_advisories_are_fetched_and_an_older_file_stands_if_that_fails(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    database(tmp_path / "web", record("torch", {"introduced": "0"}), record("numpy", {"introduced": "0"}))
    (tmp_path / "web/broken").write_text("<html>")
    kept = tmp_path / "cache/osv.zip"
    with served(tmp_path / "web") as address:
        assert refresh(f"{address}/all.zip", kept) == 2
        before = kept.read_bytes()
        for wrong in (f"{address}/absent", f"{address}/broken", "http://127.0.0.1:1/", str(tmp_path / "nowhere")):
            with pytest.raises(HotloopError, match="no advisories from"):
                refresh(wrong, kept)
    assert kept.read_bytes() == before
    assert [path.name for path in kept.parent.iterdir()] == ["osv.zip"]
    assert len(affecting(PACKAGES, kept)) == 2


@pytest.mark.parametrize("content", [None, "no json", "[1]"])
def test_what_is_no_database_is_refused(content: str | None, tmp_path: Path) -> None:
    if content:
        (tmp_path / "osv").write_text(content)
    with pytest.raises(InputError, match="cannot read advisories"):
        affecting(PACKAGES, tmp_path / "osv")


def test_newer_patches_by_the_table_and_by_an_index() -> None:
    assert [(one.package, one.newest) for one in newer_patches(PACKAGES, TABLE, None)] == [("torch", "2.14.1")]
    listed = {"pillow": ["11.0.2", "11.1.0", "11.0.3rc1", "odd"], "torch": ["2.14.3"], "numpy": []}
    found = newer_patches(PACKAGES, TABLE, lambda name: listed[name])
    assert [(one.package, one.newest) for one in found] == [("Pillow", "11.0.2"), ("torch", "2.14.3")]


def test_a_torchvision_for_another_torch_is_no_patch() -> None:
    packages = (Locked("torch", "2.14.1", ()), Locked("torchvision", "0.29.1", ()))
    assert newer_patches(packages, TABLE, lambda name: ["0.29.2"] if name == "torchvision" else []) == ()


def test_when_rebuilding_is_due(tmp_path: Path) -> None:
    fixed, open_ = (
        affecting(PACKAGES, database(tmp_path, record("numpy", {"introduced": "0"}, *end)))
        for end in ([{"fixed": "3"}], [])
    )
    newer = newer_patches(PACKAGES, TABLE, None)
    assert plan((), (), 3, 30).due is False
    assert plan((), open_, 3, 30).due is False, "nothing would come of it"
    assert "TEST-numpy, fixed in 3" in plan((), fixed, 3, 30).reasons[0]
    assert plan(newer, (), None, 30).reasons == ("torch 2.14.0 has the patch 2.14.1",)
    assert "31 days old" in plan((), (), 31, 30).reasons[0]


def test_a_bill_of_materials_is_valid_and_the_same_each_time() -> None:
    first = sbom("image", "1", PACKAGES, 1_700_000_000)
    assert first == sbom("image", "1", PACKAGES, 1_700_000_000)
    assert (first["bomFormat"], first["specVersion"]) == ("CycloneDX", "1.6")
    assert sorted(one["purl"] for one in first["components"]) == [
        "pkg:pypi/numpy@2.4.6", "pkg:pypi/pillow@11.0.0", "pkg:pypi/torch@2.14.0",
    ]  # fmt: skip
    assert first["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    assert sbom("image", "1", PACKAGES[:2], 1_700_000_000)["serialNumber"] != first["serialNumber"]
