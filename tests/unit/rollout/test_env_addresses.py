"""Addresses that name several env servers: a host name, and the servers of a Ray cluster."""

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import pytest

from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.rollout.env_addresses import RAY_NAMESPACE, lookup_of, split_addresses


def test_the_url_of_a_server_needs_no_lookup() -> None:
    assert lookup_of("http://one:8100") is None
    assert lookup_of("https://one.example/desktops") is None


async def test_a_host_name_gives_the_url_of_each_of_its_addresses() -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["10.0.0.1", "fd00::2"]

    look_up = lookup_of("dns+http://desktops.local:8100", resolve)
    assert look_up is not None
    assert await look_up() == ["http://10.0.0.1:8100", "http://[fd00::2]:8100"]


async def test_the_servers_of_a_ray_cluster_are_read_from_the_actor_that_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class RayError(Exception):
        pass

    class Urls:
        async def remote(self) -> list[str]:
            return ["http://node:4711"]

    def get_actor(name: str, namespace: str) -> SimpleNamespace:
        if (name, namespace) != ("desktops-1", RAY_NAMESPACE):
            raise ValueError(f"Failed to look up actor with name '{name}'.\nMore.")
        return SimpleNamespace(urls=Urls())

    ray, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    ray.__dict__["get_actor"], exceptions.__dict__["RayError"] = get_actor, RayError
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    look_up, other = lookup_of("ray+http://desktops-1"), lookup_of("ray+http://desktops-2")
    assert look_up is not None
    assert other is not None
    assert await look_up() == ["http://node:4711"]
    with pytest.raises(EnvServerError, match=r"^Failed to look up actor with name 'desktops-2'\.$"):
        await other()


def test_addresses_are_listed_or_separated_by_commas_and_duplicates_count_once() -> None:
    assert split_addresses("http://a:1/, http://b:1,") == ("http://a:1", "http://b:1")
    assert split_addresses(["http://a:1", "http://b:1,http://a:1"]) == ("http://a:1", "http://b:1")
    assert split_addresses([]) == ()
