"""Which interface gloo is told, with the interfaces and names of fake machines."""

from __future__ import annotations

import os
import socket

import pytest

from booster.launch import network
from booster.launch.network import VARIABLE, choose_gloo_interface, local_address

INTERFACES = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("ib0", "10.1.0.1"), ("eth0", "fe80::1")]


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that says what this machine's name stands for, and by which address it reaches others."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(network, "_own_addresses", lambda: INTERFACES)

    def set_up(named, ways=()):
        def look_up(name, port, **_):
            if named is None:
                raise socket.gaierror("Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in named]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        monkeypatch.setattr(network, "local_address", lambda host, port: dict(ways).get(host, ""))

    return set_up


HOSTS = ["a", "a", "b"]
ADDRESSES = ["127.0.0.1", "127.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize("named", [None, ["127.0.1.1"], ["127.0.0.1", "10.0.0.1"], ["192.0.2.77"]])
def test_a_name_that_leads_back_is_not_used(machine, named):
    machine(named, {"10.0.0.2": "10.0.0.1"})
    choose_gloo_interface(HOSTS, ADDRESSES, 0)
    assert os.environ[VARIABLE] == "eth0"


@pytest.mark.parametrize("named", [["10.1.0.1"], ["192.0.2.77", "10.1.0.1", "127.0.0.1"]])
def test_a_name_that_others_can_use_is_left_to_gloo(machine, named):
    machine(named, {"10.0.0.2": "10.0.0.1"})
    choose_gloo_interface(HOSTS, ADDRESSES, 0)
    assert os.environ[VARIABLE] == ""


def test_the_route_to_the_store_where_the_others_do_not_say(machine):
    machine(None)
    choose_gloo_interface(["a", "b"], ["127.0.0.1", "10.1.0.1"], 1)
    assert os.environ[VARIABLE] == "ib0"


@pytest.mark.parametrize(("hosts", "addresses"), [(["a", "a"], ["10.0.0.1"] * 2), (["a", "b"], ["127.0.0.1", ""])])
def test_nothing_is_said_on_one_machine_or_where_nothing_is_known(machine, hosts, addresses):
    machine(None)
    choose_gloo_interface(hosts, addresses, 0)
    assert os.environ[VARIABLE] == ""


def test_the_users_own_choice_stays(machine, monkeypatch):
    machine(None, {"10.0.0.2": "10.0.0.1"})
    monkeypatch.setenv(VARIABLE, "ib0")
    choose_gloo_interface(HOSTS, ADDRESSES, 0)
    assert os.environ[VARIABLE] == "ib0"


def test_the_way_to_this_machine_is_its_loopback():
    assert local_address("127.0.0.1", 1) == "127.0.0.1"
    assert local_address("name.invalid", 1) == ""
