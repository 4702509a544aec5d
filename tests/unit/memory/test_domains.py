"""Domains and their names."""

from __future__ import annotations

import pytest

from penstock.memory.domains import RAM, Domain, domain_of


@pytest.mark.parametrize(
    ("domain", "name"),
    [(RAM, "ram"), (Domain.gpu(3), "gpu:3"), (Domain.gpu(0, "node1"), "node1/gpu:0")],
)
def test_a_domain_has_a_name(domain: Domain, name: str) -> None:
    assert str(domain) == name


@pytest.mark.parametrize(
    ("device", "domain"), [("cpu", RAM), ("cuda:1", Domain.gpu(1)), ("cuda", Domain.gpu(0))]
)
def test_a_device_computes_in_a_domain(device: str, domain: Domain) -> None:
    assert domain_of(device) == domain


def test_ram_of_any_host_is_ram() -> None:
    other = Domain(RAM.device, "node1")
    assert RAM.is_ram and other.is_ram and other != RAM
    assert not Domain.gpu(0).is_ram
