"""Configuration: whatever is wrong is named, with what is allowed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from rfstream.config import Config, load_config
from rfstream.errors import ConfigError, DatasetError
from rfstream.imports import import_object

GOOD = "data: {path: pack}\nstream: {batch_size: 4}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stream.batch_size=0", r"stream.batch_size: input should be greater than or equal to 1 \(got 0\)"),
        ("stream.batch_size=many", r"stream.batch_size: input should be a valid integer.*\(got 'many'\)"),
        ("stream.bath_size=4", r"unknown key stream.bath_size \(known here: batch_size, grad_accum"),
        ("streams.batch_size=4", r"unknown key streams \(known here: data, stream"),
        ("decode.actors=[3,1]", r"decode.actors: the minimum 3 exceeds the maximum 1"),
        ("stream.tail=pad", r"stream.tail: input should be 'wrap' or 'drop' \(got 'pad'\)"),
        ("stream.global_batch=6", r"stream: global_batch 6 is not a multiple of batch_size 4"),
        ("stream.block_bytes=lots", r"stream.block_bytes: .*\(got 'lots'\)"),
        ("stream.timeout_s=0", r"stream.timeout_s: input should be greater than 0"),
        ("stream.timeout_s=.inf", r"stream.timeout_s: input should be a finite number"),
        ("augment.cpu={args: {a: 1}}", r"augment.cpu: set exactly one of transform"),
        ("augment.device.normalize=zscore", r"augment.device.normalize"),
        ("train.launcher=slurm", r"train.launcher: input should be 'local', 'ray' or 'torchrun'"),
        ("data={}", r"data.path is required"),
        ("stream.batch_size", r"override 'stream.batch_size' is not of the form section.key=value"),
        ("stream.batch_size.x=1", r"override .*: batch_size holds a value, not a section"),
        ("stream.seed=[", r"the value is not valid YAML"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file, [override])
    assert "\n" not in str(caught.value)


def test_both_accumulations_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="either grad_accum or global_batch"):
        load_config(file, ["stream.grad_accum=2", "stream.global_batch=8"])


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "must hold a mapping"), (":\n- [", "not valid YAML"), (None, "can't be read")]
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_overrides_and_keyword_arguments_build_the_same(file: Path) -> None:
    loaded = load_config(file, ["stream.block_bytes=256MiB", "decode.actors=[1, 3]", "stream.seed=7"])
    built = Config(data={"path": "pack"}, stream={"batch_size": 4, "seed": 7}, decode={"actors": (1, 3)})
    assert loaded == built
    assert loaded.stream.block_bytes == 256 * 1024**2


def test_keyword_arguments_fail_in_one_sentence_too() -> None:
    with pytest.raises(ConfigError, match="unknown key stream"):
        Config(data={"path": "p"}, stream={"batch": 1})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("os.path", "not of the form"),
        ("no_such_module_anywhere:f", "can't be imported"),
        ("os.path:nothing", "has no nothing"),
        ("os.path:sep", "is not callable"),
    ],
)
def test_an_import_path_that_leads_nowhere_is_named(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_object(path, "augment.cpu.transform")


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("-2.5E3", -2500.0), ("3", 3), ("007", 7), ("1e", "1e"), (".", ".")]
)
def test_numbers_are_yaml_1_2s(file: Path, text: str, value: object) -> None:
    assert load_config(file, [f"train.model_args.x={text}"]).train.model_args == {"x": value}


def test_a_module_that_fails_to_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("import os\nos.nothing_of_the_kind\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="AttributeError: module 'os' has no attribute"):
        import_object("broken_module:build", "train.model")


def test_messages_keep_no_secrets_of_urls() -> None:
    said = "https://me:secret@host/a?sig=secret: not there (s3://b/c?x=secret), see https://d/e?f=secret; look"
    assert str(DatasetError(said)) == "https://host/a: not there (s3://b/c), see https://d/e; look"
    assert str(pickle.loads(pickle.dumps(DatasetError(said)))) == str(DatasetError(said))
    assert str(DatasetError("is it there? gs://b/c: no")) == "is it there? gs://b/c: no"


@pytest.mark.parametrize("decode", [{"masks": True}, {"pad_multiple": 32}, {"exif": "transpose"}, {"shrink_to": 9}])
def test_what_is_for_images_is_refused_for_episodes(decode: dict[str, object]) -> None:
    (name,) = decode
    with pytest.raises(ConfigError, match=f"decode.{name} has no part in data.format: lerobot; leave it out"):
        Config(data={"path": "episodes", "format": "lerobot"}, decode=decode)


def test_a_role_may_be_one_pack_s_alone() -> None:
    data = Config(data={"path": [{"path": "a"}, {"path": "b", "splits": {"test": "holdout", "val": None}}]}).data
    assert [role for role in ("train", "val", "test", "other") if data.names_role(role)] == ["train", "val", "test"]
