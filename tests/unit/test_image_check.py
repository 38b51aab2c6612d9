"""What is wrong with a Dockerfile or an image, by our own rules."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.core.errors import InputError
from hotloop.image.check import check, of_dockerfile, of_image
from hotloop.image.instructions import parse, read_instructions
from hotloop.versions.table import shipped_table

TABLE = shipped_table()
CLEAN = """FROM docker.io/library/ubuntu:24.04@sha256:{digest} AS build
RUN pip install --require-hashes -r requirements.lock
FROM docker.io/library/ubuntu:24.04@sha256:{digest}
COPY --from=build --chown=0:0 /opt/venv /opt/venv
USER 1000:1000
HEALTHCHECK CMD ["hotloop", "doctor"]
""".format(digest="0" * 64)


def ids(text: str, driver: str = "") -> dict[str, str]:
    """Of what is found -> level."""
    return {one.id: one.level for one in check(of_dockerfile(parse(text), TABLE), TABLE, driver)}


def test_nothing_is_found_in_a_clean_one() -> None:
    assert ids(CLEAN) == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("FROM ubuntu", {"image-base-latest": "error"}),
        ("FROM ubuntu:latest AS x", {"image-base-latest": "error"}),
        ("FROM registry.example:5000/ubuntu", {"image-base-latest": "error"}),
        ("FROM --platform=linux/amd64 ubuntu:24.04", {"image-base-unpinned": "note"}),
        ("FROM ${BASE}", {}),
        ("FROM scratch", {}),
    ],
)
def test_bases(line: str, expected: dict[str, str]) -> None:
    assert ids(f"{line}\nUSER 1000\nHEALTHCHECK CMD true\n") == expected


@pytest.mark.parametrize(
    ("added", "id", "level"),
    [
        ("USER root", "image-root", "error"),
        ("USER 0:0", "image-root", "error"),
        ("HEALTHCHECK NONE", "", ""),
        ("RUN chown -R 1000:1000 /opt/venv", "image-chown-doubles", "warning"),
        ("RUN true && \\\n    chmod --recursive a+r /opt", "image-chown-doubles", "warning"),
        ("RUN chown 1000 /opt/venv", "", ""),
        ("ENV API_TOKEN=abc", "image-secret-in-env", "error"),
        ("ENV DB_PASSWORD abc", "image-secret-in-env", "error"),
        ("ENV PASSWORD_FILE=/run/secrets/x TOKENIZERS_PARALLELISM=false", "", ""),
        ("ENV LINK=https://me:word@example.org/", "image-secret-in-env", "error"),
        ("LABEL note=AKIAABCDEFGHIJKLMNOP", "image-secret-in-env", "error"),
        ("ARG HF_TOKEN", "image-secret-in-arg", "error"),
        ("COPY .env /workspace/", "image-secret-copied", "error"),
        ('COPY ["home/.netrc", "/root/.netrc"]', "image-secret-copied", "error"),
        ("RUN pip install numpy", "image-packages-unpinned", "warning"),
        ("RUN cd /tmp && pip3 install -U torch>=2", "image-packages-unpinned", "warning"),
        ("RUN uv pip install 'einops'", "image-packages-unpinned", "warning"),
        ("RUN pip install numpy==2.4.6 /tmp/x.whl -r a.lock --find-links there .", "", ""),
    ],
)
def test_what_one_line_changes(added: str, id: str, level: str) -> None:
    assert ids(f"{CLEAN}{added}\n").get(id, "") == level
    if not id:
        assert ids(f"{CLEAN}{added}\n").keys() <= {"image-no-health-check"}


def test_secrets_are_not_repeated() -> None:
    subject = of_dockerfile(parse(f"{CLEAN}ENV API_TOKEN=hunter2hunter2\n"), TABLE)
    assert "hunter2" not in str(check(subject, TABLE))


def test_what_is_in_the_build_stage_does_not_count_as_the_images() -> None:
    assert ids(CLEAN.replace("RUN pip", "COPY a /b\nRUN chown -R 1000 /b\nUSER root\nRUN pip", 1)) == {}


def test_stages_that_the_final_one_begins_with_do_count() -> None:
    assert ids("FROM ubuntu:24.04 AS base\nUSER 1000\nFROM base\nHEALTHCHECK CMD true\n") == {
        "image-base-unpinned": "note"
    }


CUDA = "FROM nvidia/cuda:{image}\nRUN pip install torch==2.14.1 {option}\nUSER 1000\nHEALTHCHECK CMD true\n"


@pytest.mark.parametrize(
    ("image", "option", "expected"),
    [
        ("13.0.2-runtime-ubuntu24.04", "", {"image-cuda-twice": "warning"}),
        ("12.6.3-base-ubuntu24.04", "", {"image-cuda-mismatch": "error"}),
        ("12.8.1-devel-ubuntu24.04", "--index-url=https://x/whl/cu126",
         {"image-cuda-twice": "warning", "image-cuda-mismatch": "warning"}),
        ("12.6.3-base-ubuntu24.04", "--torch-backend=cu126", {}),
    ],
)  # fmt: skip
def test_cuda_of_the_base_against_torchs(image: str, option: str, expected: dict[str, str]) -> None:
    found = ids(CUDA.format(image=image, option=option))
    assert found.pop("image-base-unpinned") == "note"
    assert found == expected


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("535.104.05", {"image-driver-floor": "error"}),
        ("580.65.06", {}),
        ("580.1", {"image-driver-limited": "warning"}),
    ],
)
def test_the_driver_of_the_fleet(driver: str, expected: dict[str, str]) -> None:
    assert ids(f"{CLEAN}RUN pip install torch==2.14.1\n", driver) == expected


def test_a_driver_needs_a_known_torch() -> None:
    assert ids(CLEAN, "580") == {"image-driver-unknown": "warning"}


def test_an_image_is_examined_by_its_configuration() -> None:
    labels = {"hotloop.torch": "2.14.1", "hotloop.cuda": "13.0"}
    config = {"Env": ["PATH=/bin", "SECRET_KEY=x"], "User": "", "Labels": labels, "Healthcheck": None}
    found = {one.id for one in check(of_image(config), TABLE, "535")}
    assert found == {"image-root", "image-secret-in-env", "image-no-health-check", "image-driver-floor"}
    good = {"Env": ["PATH=/bin"], "User": "1000:1000", "Labels": labels, "Healthcheck": {"Test": ["CMD", "true"]}}
    assert check(of_image(good), TABLE, "580.65.06") == ()


def test_heredocs_and_continued_lines_are_one_instruction() -> None:
    text = (
        "FROM a:1\nRUN <<EOF\nUSER root\npip install x==1\nEOF\n# no USER\nRUN a \\\n  # between\n  && b\nUSER 1000\n"
    )
    found = [(one.name, one.line) for one in parse(text)]
    assert found == [("FROM", 1), ("RUN", 2), ("RUN", 7), ("USER", 10)]
    assert parse(text)[2].value == "a && b"


LINES = st.sampled_from(
    ["FROM a:1 AS b", "from b", "RUN x \\", "", "# c", "ENV A=1 B='2", "ENV C", "COPY [\"a\", ", "RUN <<E", "E",
     "USER 1000", "LABEL a=b", "ARG", "ONBUILD RUN x", "HEALTHCHECK", "\\", "FROM"]
)  # fmt: skip


@given(st.lists(LINES, max_size=12))
def test_anything_can_be_examined(lines: list[str]) -> None:
    text = "\n".join(lines)
    found = parse(text)
    assert all(1 <= one.line <= len(lines) for one in found)
    for one in check(of_dockerfile(found, TABLE), TABLE, "580"):
        assert one.level in ("error", "warning", "note")
        assert 0 <= one.line <= len(lines)


@pytest.mark.parametrize("content", [None, b"no instruction\n", b"\xff\xfe"])
def test_what_is_no_dockerfile_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content:
        (tmp_path / "Dockerfile").write_bytes(content)
    with pytest.raises(InputError):
        read_instructions(tmp_path / "Dockerfile")
