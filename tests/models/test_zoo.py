"""The embedded checkpoints, by name, from a source tree and from a wheel."""
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trueup.models import load_model, zoo
from trueup.models.config import ModelConfig
from trueup.models.tokenizer import Tokenizer

NANO = "glm-4.7-flash-nano"
MODELS = Path(__file__).parents[2] / "packages" / "models"


def test_names_and_paths():
    assert {NANO, "glm-5-nano"} <= set(zoo.names()) and zoo.eagle3().name not in zoo.names()
    assert all(zoo.path(name) == zoo.path(NANO).with_name(name) for name in zoo.names())


def test_a_model_has_a_config_and_a_tokenizer_or_a_base(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "_root", lambda: tmp_path)
    for name, files in {"whole": ("config.json", "tokenizer.json"), "delta": ("config.json", "delta.json"),
                        "head": ("config.json", "model.safetensors"), "tokens": ("tokenizer.json",),
                        "empty": (), "__pycache__": ("__init__.pyc",)}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    (tmp_path / "__init__.py").touch()
    assert zoo.names() == ["delta", "whole"]
    assert zoo.resolve("delta") == tmp_path / "delta"


@pytest.mark.parametrize("name", zoo.names())
def test_every_model_loads(name):
    """A delta's base comes with it."""
    folder = zoo.path(name)
    model = load_model(name, dtype="float32", progress=False)
    assert model.config == ModelConfig.from_folder(folder)
    assert Tokenizer.from_folder(folder, model.config).apply_chat_template([{"role": "user", "content": "hi"}])


def test_an_unknown_name_lists_the_known_ones_and_mentions_folders(tmp_path):
    for ask in (zoo.path, zoo.resolve):
        with pytest.raises(ValueError, match=f"'nano'; there are .*{NANO}.* folder"):
            ask("nano")
    with pytest.raises(ValueError, match=r"no embedded model"):
        zoo.resolve(tmp_path / "absent")
    for trick in ("", ".", "..", f"{NANO}/", "__pycache__"):
        with pytest.raises(ValueError, match=r"no embedded model"):
            zoo.path(trick)


def test_resolve_takes_a_name_or_a_folder(tmp_path, monkeypatch):
    assert zoo.resolve(NANO) == zoo.path(NANO)
    assert zoo.resolve(tmp_path) == tmp_path == zoo.resolve(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / NANO).mkdir()
    assert zoo.resolve(NANO) == zoo.path(NANO)
    assert zoo.resolve(f"./{NANO}").resolve() == tmp_path / NANO


def test_a_wheel_holds_the_data_files(tmp_path):
    pytest.importorskip("hatchling")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=MODELS, check=True,
                   capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    installed = tmp_path / "trueup" / "models" / "zoo"
    for folder in (*map(zoo.path, zoo.names()), zoo.eagle3()):
        for file in folder.iterdir():
            assert (installed / folder.name / file.name).read_bytes() == file.read_bytes()
    assert not (tmp_path / "trueup" / "__init__.py").exists()  # a namespace package, shared with core
