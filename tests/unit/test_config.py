"""Settings from dicts and Python files."""

from __future__ import annotations

import copy

import pytest

from booster.errors import ConfigError
from booster.launch.config import Config


def test_attributes_and_items_at_every_depth():
    config = Config({"lr": 0.1, "model": {"dim": 64, "layers": [{"kind": "mlp"}]}})
    assert config.lr == config["lr"] == 0.1
    assert config.model.dim == config["model"]["dim"] == 64
    assert config.model.layers[0].kind == "mlp"


def test_it_is_a_mapping():
    config = Config({"lr": 0.1, "model": {"dim": 64}})
    assert dict(**config)["lr"] == 0.1
    assert config.get("missing", 3) == 3
    assert "lr" in config
    assert config.to_dict() == {"lr": 0.1, "model": {"dim": 64}}
    assert config == Config({"lr": 0.1, "model": {"dim": 64}})
    assert copy.deepcopy(config) == config


def test_a_missing_name_lists_what_there_is():
    with pytest.raises(AttributeError, match=r"no setting 'rl'; it has: lr, model"):
        _ = Config({"lr": 0.1, "model": {}}).rl


def test_dicts_with_other_keys_stay_dicts():
    assert Config({"table": {1: "a"}}).table == {1: "a"}
    with pytest.raises(ConfigError, match="key 1"):
        Config({1: "a"})


def test_file_keeps_its_own_names_only(tmp_path):
    path = tmp_path / "settings.py"
    path.write_text(
        "from __future__ import annotations\n"
        "import math\nfrom pathlib import Path\nfrom os.path import join\n"
        "_hidden = 1\nlr = math.sqrt(4)\nmodel = dict(dim=8)\nhere = __file__\n"
        "def schedule(step):\n    return lr * step\n"
    )
    config = Config.from_file(path)
    assert sorted(config) == ["here", "lr", "model", "schedule"]
    assert config.schedule(3) == 6.0
    assert config.here == str(path)


def test_file_that_fails_says_how(tmp_path):
    path = tmp_path / "settings.py"
    path.write_text("lr = 1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        Config.from_file(path)


def test_paths_that_cannot_work(tmp_path):
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not exist"):
        Config.load(str(tmp_path / "none.py"))
    with pytest.raises(ConfigError, match=r"does not end in \.py"):
        Config.load(tmp_path / "settings.json")
    with pytest.raises(ConfigError, match="is a directory"):
        Config.load(tmp_path)
    with pytest.raises(ConfigError, match="is a list"):
        Config.load([1])
