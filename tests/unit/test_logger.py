"""Log lines: one per record, with the rank, from the ranks that were asked for."""

from __future__ import annotations

import logging
import re

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from booster.errors import ConfigError
from booster.logger import get_dist_logger


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def logger():
    logger = get_dist_logger("test")
    yield logger
    logger.set_level("INFO")
    logger.close_files()


@pytest.fixture
def rank_3_of_4():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield
    dist.destroy_process_group()


def test_form_of_a_line(logger, capsys):
    logger.info("hello")
    line = capsys.readouterr().err
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] \[rank 0/1\] INFO test: hello\n", line)


def test_levels(logger, capsys):
    for level in ("debug", "info", "warning", "error", "critical"):
        getattr(logger, level)("x")
    assert re.findall(r"\] ([A-Z]+) test", capsys.readouterr().err) == ["INFO", "WARNING", "ERROR", "CRITICAL"]
    logger.set_level("debug")
    logger.debug("x")
    assert "DEBUG" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="'LOUD'"):
        logger.set_level("LOUD")


def test_a_record_is_one_line(logger, capsys):
    logger.info("a\nb\r\nc 100% {}")
    assert capsys.readouterr().err.endswith("a\\nb\\nc 100% {}\n")


def test_same_logger_and_no_second_handler(logger, capsys):
    assert get_dist_logger("test") is logger
    get_dist_logger("test").info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_the_root_logger_hears_nothing(logger):
    root, heard = logging.getLogger(), []
    handler = logging.Handler()
    handler.emit = heard.append
    root.addHandler(handler)
    before = list(root.handlers)
    logger.error("mine")
    get_dist_logger("root").error("mine")
    assert root.handlers == before
    root.removeHandler(handler)
    assert heard == []


def test_rank_is_looked_up_when_the_record_comes(logger, capsys, rank_3_of_4):
    logger.info("for all")
    logger.info("for three", ranks=[1, 3])
    logger.info("for others", ranks=[0])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ", 1)[1] for line in lines] == [
        "[rank 3/4] INFO test: for all",
        "[rank 3/4] INFO test: for three",
    ]


def test_before_the_launch_the_launchers_variables_count(logger, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    logger.info("early")
    logger.info("hidden", ranks=[0])
    assert "[rank 1/2] INFO test: early" in (text := capsys.readouterr().err)
    assert "hidden" not in text


def test_log_to_file(logger, tmp_path, capsys):
    path = tmp_path / "logs" / "run.log"
    assert logger.log_to_file(path) == path
    logger.log_to_file(path)
    logger.info("kept")
    logger.close_files()
    logger.info("not kept")
    assert path.read_text().count("kept") == 1
    assert "not kept" in capsys.readouterr().err
    logger.log_to_file(path, mode="w")
    assert path.read_text() == ""


def test_each_of_several_ranks_has_its_own_file(logger, tmp_path, rank_3_of_4):
    assert logger.log_to_file(tmp_path / "run.log") == tmp_path / "run.rank3.log"


def test_log_to_file_refuses(logger, tmp_path):
    with pytest.raises(ConfigError, match="directory"):
        logger.log_to_file(tmp_path)
    with pytest.raises(ConfigError, match="mode='r'"):
        logger.log_to_file(tmp_path / "run.log", mode="r")
