"""What is rendered: for every build of the table, by any options, the same bytes each time."""

import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.core.errors import HotloopError, InputError
from hotloop.image.bases import known_bases, known_toolkits
from hotloop.image.check import check, hadolint, of_dockerfile
from hotloop.image.instructions import parse, rendered_for
from hotloop.image.lock import parse_lock
from hotloop.image.recipe import OLDEST_PYTHON, PARTS, PROFILES, Options, Recipe, gcc_for, make_recipe
from hotloop.image.render import apptainer, devcontainer, dockerfile, ignored
from hotloop.image.wheel import make_wheel, wheel_name
from hotloop.versions.solve import Wish
from hotloop.versions.table import Build, shipped_table

TABLE = shipped_table()
EXTENSION = "flash-attn==2.8.3"


def recipe_of(build: Build, options: Options) -> Recipe:
    wish = Wish(torch=f"=={build.torch}", cuda=build.cuda, processor=build.processor)
    return make_recipe(wish, options, TABLE)


def hadolint_all(files: list[Path]) -> list[str]:
    """hadolint reads many files at once in the time of one."""
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(program), "--no-fail", "--format", "json", *map(str, files)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return [f"{Path(row['file']).name}:{row['line']} {row['code']} {row['message']}" for row in json.loads(done.stdout)]


@pytest.mark.slow
def test_every_build_of_the_table_renders_hadolint_clean_in_every_profile(tmp_path: Path) -> None:
    files = []
    for number, build in enumerate(TABLE.builds):
        for profile in PROFILES:
            recipe = recipe_of(build, Options(profile))
            assert (recipe.build.torch, recipe.build.cuda) == (build.torch, build.cuda)
            files.append(tmp_path / f"{number}-{profile}")
            files[-1].write_text(dockerfile(recipe))
    assert len(files) == 3 * len(TABLE.builds) > 200
    assert hadolint_all(files) == []


def test_every_build_compiles_extensions_with_its_own_cuda(tmp_path: Path) -> None:
    files = []
    for number, build in enumerate(TABLE.builds):
        recipe = recipe_of(build, Options(extensions=(EXTENSION,)))
        assert recipe.toolkit
        assert recipe.toolkit.cuda == build.cuda
        assert int(gcc_for(recipe.toolkit, recipe.base)) <= recipe.toolkit.newest_gcc
        files.append(tmp_path / f"{number}")
        files[-1].write_text(dockerfile(recipe))
        final = files[-1].read_text().split("AS final")[1]
        assert "cuda-" not in final.replace("pytorch-cuda-", "").split("LABEL")[0], "the compiler stays behind"
    assert hadolint_all(files) == []


def test_hadolint_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("FROM debian\nRUN cd /tmp && sudo ls\n")
    assert {"DL3006", "DL3004"} <= {one.id for one in hadolint(file)}


options = st.builds(
    Options,
    profile=st.sampled_from(PROFILES),
    parts=st.lists(st.sampled_from(PARTS), unique=True).map(lambda parts: tuple(sorted(parts))),
    packages=st.lists(st.sampled_from(["einops>=0.8", "wandb", "pandas[parquet]"]), unique=True).map(tuple),
    timestamp=st.integers(0, 2**31),
    source=st.sampled_from(["", "https://example.org/project.git"]),
)


@given(st.sampled_from(TABLE.builds), options)
def test_our_own_rules_find_nothing_in_what_we_render(build: Build, wanted: Options) -> None:
    recipe = recipe_of(build, wanted)
    instructions = parse(dockerfile(recipe))
    subject = of_dockerfile(instructions, TABLE)
    assert [one for one in check(subject, TABLE) if one.id != "image-base-unpinned"] == []
    assert (subject.user, subject.torch, subject.cuda) == ("1000:1000", build.torch, build.cuda)
    assert not any("\n" in value for _, _, _, value in subject.environment)
    variables = {name: value for _, kind, name, value in subject.environment if kind == "ENV"}
    assert {"USER", "LOGNAME", "HOME", "TZ", "TORCHINDUCTOR_CACHE_DIR"} <= variables.keys()
    assert "DEBIAN_FRONTEND" not in variables, "it is the build's, not the image's"


@given(options)
def test_labels_tell_what_was_asked_for(wanted: Options) -> None:
    recipe = make_recipe(Wish(driver="580.95.05", cards=((9, 0),), torch="==2.13.*"), wanted, TABLE)
    labels = {k: v for one in parse(dockerfile(recipe)) if one.name == "LABEL" for k, v in one.pairs.items()}
    assert recipe.tag.startswith("pytorch-cuda-base:v2.13.0-cuda13.0-ubuntu24.04")
    assert labels["org.opencontainers.image.created"] == recipe.created
    assert labels.get("org.opencontainers.image.source", "") == wanted.source
    assert labels["hotloop.torch"] == "2.13.0"


def test_a_tag_and_a_timestamp_are_read_back(tmp_path: Path) -> None:
    recipe = make_recipe(Wish(torch="==2.13.*"), Options(timestamp=1_700_000_000), TABLE)
    (tmp_path / "Dockerfile").write_text(dockerfile(recipe))
    assert rendered_for(tmp_path / "Dockerfile") == (recipe.tag, 1_700_000_000)
    assert recipe.created == "2023-11-14T22:13:20Z"


def test_compilers_are_where_something_is_compiled_at_run_time() -> None:
    with_compilers = {p for p in PROFILES if " g++ " in dockerfile(make_recipe(Wish(), Options(p), TABLE))}
    assert with_compilers == {"train", "develop"}


def test_parts_bring_their_packages_for_this_cuda() -> None:
    old = make_recipe(Wish(cuda="12.6", torch="==2.7.*"), Options(parts=("dali", "gpu-decode")), TABLE)
    new = make_recipe(Wish(cuda="13.0", torch="==2.14.*"), Options(parts=("dali", "exporter")), TABLE)
    assert {"nvidia-dali-cuda120", "nvidia-nvjpeg-cu12"} <= set(old.requirements)
    assert {"nvidia-dali-cuda130", "prometheus-client"} <= set(new.requirements)
    assert 'NVIDIA_DRIVER_CAPABILITIES="compute,utility,video"' in dockerfile(old)


def test_what_hotloop_trains_with_is_left_out_beside_an_older_torch() -> None:
    old, new = (make_recipe(Wish(torch=torch), Options(), TABLE) for torch in ("==2.2.*", "==2.14.*"))
    assert "numpy<2" in old.requirements
    assert not any(one.startswith("timm") for one in old.requirements)
    assert any(one.startswith("timm") for one in new.requirements)
    assert any("newer torch only" in note for note in old.notes)


def test_other_builds_than_the_default_are_fetched_by_uv() -> None:
    recipe = make_recipe(Wish(torch="==2.14.1", cuda="12.6"), Options(), TABLE)
    assert (recipe.versions["cudnn"], recipe.versions["nccl"]) == ("9.10.2.21", "2.29.3")
    text = dockerfile(recipe)
    assert "--torch-backend=cu126" in text
    assert "://" not in text, "no address of an index"
    assert "--torch-backend" not in dockerfile(make_recipe(Wish(torch="==2.14.1", cuda="13.0"), Options(), TABLE))


def test_python_chooses_the_base() -> None:
    for base in known_bases().values():
        assert make_recipe(Wish(python=base.python), Options(), TABLE).base.python == base.python
    assert make_recipe(Wish(torch="==2.1.*"), Options(), TABLE).base.name == "debian12", "2.1 ends with Python 3.11"


def test_the_oldest_python_is_hotloops_own() -> None:
    assert metadata.metadata("hotloop")["Requires-Python"] == f">={OLDEST_PYTHON}"


def test_every_cuda_of_the_table_has_a_compiler() -> None:
    assert {build.cuda for build in TABLE.builds} <= known_toolkits().keys()


@pytest.mark.parametrize(
    ("wish", "wanted", "message"),
    [
        (Wish(), Options(base="arch"), "--base arch is not known"),
        (Wish(), Options(base="example.org/base:1"), "needs --python"),
        (Wish(python="3.11"), Options(base="ubuntu24.04"), "has no Python 3.11"),
        (Wish(python="3.10"), Options(base="ubuntu:22.04"), "Python 3.10 is older than 3.11"),
        (Wish(python="3.9"), Options(), "no base has Python 3.9"),
        (Wish(), Options(packages=("a b",)), "is no requirement"),
        (Wish(), Options(extensions=("flash-attn",)), "names no version"),
        (
            Wish(cuda="12.8"),
            Options(base="debian13", extensions=(EXTENSION,)),
            "extensions cannot be compiled on debian13",
        ),
        (Wish(driver="590.44.01", cards=((7, 0),)), Options(), "no torch fits"),
    ],
)
def test_what_cannot_be_is_refused(wish: Wish, wanted: Options, message: str) -> None:
    with pytest.raises(HotloopError, match=re.escape(message)) as raised:
        make_recipe(wish, wanted, TABLE)
    assert len(str(raised.value).splitlines()) == 3
    assert isinstance(raised.value, InputError) == (message != "no torch fits")


def test_files_beside_the_dockerfile() -> None:
    recipe = make_recipe(Wish(torch="==2.13.*"), Options("develop"), TABLE)
    assert json.loads(devcontainer(recipe))["build"] == {"dockerfile": "../Dockerfile", "context": ".."}
    definition = apptainer(recipe)
    archive = re.findall(r"^From: (.*)$", definition, re.MULTILINE)[0]
    assert f"docker-archive:{archive}" in definition
    assert definition.startswith("#")
    assert 'export XDG_CACHE_HOME="$HOME/.cache"' in definition, "the image's own cannot be written there"
    assert "tini -s -g" in definition, "it is not process 1 there"
    copied = [one.value for one in parse(dockerfile(recipe)) if one.name == "COPY" and "--from" not in one.value]
    allowed = {line[2:] for line in ignored().splitlines() if line.startswith("!*")}
    assert all(any(word.endswith(end) for end in allowed) for value in copied for word in value.split()[:-1])


def test_the_wheel_is_this_hotloop_and_the_same_each_time(tmp_path: Path) -> None:
    first = make_wheel()
    assert first == make_wheel()
    (tmp_path / wheel_name()).write_bytes(first)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path / "to"),
         str(tmp_path / wheel_name())], check=True, timeout=120,
    )  # fmt: skip
    assert (tmp_path / "to/hotloop/versions/table.json").is_file()
    assert (tmp_path / "to/hotloop/image/templates/Dockerfile.j2").is_file()
    assert "hotloop.cli.main" in (tmp_path / "to/bin/hotloop").read_text()
    assert not any("__pycache__" in name for name in zipfile.ZipFile(BytesIO(first)).namelist())


@given(st.lists(st.tuples(st.from_regex(r"[a-z]([a-z-]{0,8}[a-z])?", fullmatch=True), st.integers(0, 99))))
def test_lock_files_are_read_as_uv_writes_them(packages: list[tuple[str, int]]) -> None:
    text = "".join(
        f"{name}==1.{minor} \\\n    --hash=sha256:{minor:064x} \\\n    --hash=sha256:{minor + 1:064x}\n    # via x\n"
        for name, minor in packages
    )
    found = parse_lock(text)
    assert [(one.name, one.version) for one in found] == [(name, f"1.{minor}") for name, minor in packages]
    assert all(len(one.hashes) == 2 for one in found)
