"""Secrets in a job, in the spellings in which people write them; and what only looks like one."""

from typing import Any

import pytest

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.launch.secrets import check_secrets

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.SflKxwRJSMeKKF2QT4"


def job(**sections: Any) -> Job:
    return Job.model_validate({"data": {"train": "x"}, "model": {"name": "m"}, **sections})


def variable(name: str, value: str) -> Job:
    return job(launch={"environment": {name: value}})


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "WANDB_API_KEY", "COMET_APIKEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "MY_PASSWD",
     "DB_PASS", "MYSQL_PWD", "PASSPHRASE", "CLIENT_SECRET", "SSH_KEY", "AWS_CREDENTIALS"],
)  # fmt: skip
def test_variables_that_are_named_like_one(name: str) -> None:
    with pytest.raises(InputError, match=f"launch.environment.{name} looks like a secret"):
        check_secrets(variable(name, "abc"))
    for harmless in ("", "4096", "false", "/run/file", "$MINE", "~/.file"):
        check_secrets(variable(name, harmless))


@pytest.mark.parametrize(
    "value",
    ["AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE", "hf_abcdefghijklmnopqrst", "npm_" + "a1" * 18, "AIza" + "a" * 35,
     "sk-ant-api03-abc_def-ghijklmnopq", "sk_live_abcdefghijklmnopqr", "pypi-AgEIcHlwaS5vcmcC", JWT,
     f"Authorization: Bearer {JWT}", "Basic dXNlcjpwYXNzdw==", "postgres://u:p@host/db", "redis://:p@host",
     "https://ghtoken0123456789@host/x", "https://a.example/c?sv=2020&sig=abcdefgh%3D",
     "https://b.example/k?X-Amz-Signature=abcdef01", "AccountName=x;AccountKey=abcd1234abcd1234==;Suffix=y",
     "-----BEGIN OPENSSH PRIVATE KEY-----"],
)  # fmt: skip
def test_values_that_are_one_wherever_they_are(value: str) -> None:
    for where in (variable("A", value), job(data={"train": value}), job(launch={"setup": [f"x {value}"]}),
                  job(launch={"ray": {"runtime_env": {"pip": [value]}}})):  # fmt: skip
        with pytest.raises(InputError, match="looks like a secret"):
            check_secrets(where)


@pytest.mark.parametrize(
    "section",
    [{"setup": ["export HF_TOKEN='abcdef'"]}, {"setup": ["huggingface-cli login --token abcdef"]},
     {"setup": ["mysql --password=hunter2"]}, {"setup": ["wandb login --relogin " + "0a" * 20]},
     {"slurm": {"options": ["--export=ALL,HF_TOKEN=abcdef"]}},
     {"slurm": {"options": ["--export=HF_TOKEN=abcdef,A=b"]}}],
)  # fmt: skip
def test_words_for_a_shell(section: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="looks like a secret"):
        check_secrets(job(launch=section))


@pytest.mark.parametrize(
    "section",
    [{"setup": ["export HF_TOKEN=$(cat ~/.token)", "wandb login $KEY", "source /opt/basic environment", "cd --path x"]},
     {"environment": {"TOKENIZERS_PARALLELISM": "false", "BYPASS": "yes do", "COMPASS": "north", "A": "basic words"}},
     {"environment": {"URL": "https://user:$PASSWORD@host", "GIT": "ssh://git@github.com/x", "AT": "a@example.org"}},
     {"image": "registry.example:5000/team/hotloop@sha256:" + "0a" * 32, "slurm": {"options": ["--constraint=h200"]}}],
)  # fmt: skip
def test_what_only_looks_like_one(section: dict[str, Any]) -> None:
    check_secrets(job(launch=section, data={"train": "/data/sk-learn-datasets-version-2024"}))
