"""Public addresses, checked against IANA's registries of special-purpose addresses."""

from __future__ import annotations

import ipaddress

import pytest

from workers.webhooks.http import ForbiddenAddress, check_address, check_public

# https://www.iana.org/assignments/iana-ipv4-special-registry and iana-ipv6-special-registry: each block, True if it is
# globally reachable (None: "N/A"), and its purpose.
REGISTRIES: list[tuple[str, bool | None, str]] = [
    ("0.0.0.0/8", False, "this network"),
    ("0.0.0.0/32", False, "this host on this network"),
    ("10.0.0.0/8", False, "private use"),
    ("100.64.0.0/10", False, "shared address space"),
    ("127.0.0.0/8", False, "loopback"),
    ("169.254.0.0/16", False, "link local"),
    ("172.16.0.0/12", False, "private use"),
    ("192.0.0.0/24", False, "IETF protocol assignments"),
    ("192.0.0.0/29", False, "IPv4 service continuity prefix"),
    ("192.0.0.8/32", False, "IPv4 dummy address"),
    ("192.0.0.9/32", True, "port control protocol anycast"),
    ("192.0.0.10/32", True, "traversal using relays around NAT anycast"),
    ("192.0.0.170/32", False, "NAT64/DNS64 discovery"),
    ("192.0.0.171/32", False, "NAT64/DNS64 discovery"),
    ("192.0.2.0/24", False, "documentation (TEST-NET-1)"),
    ("192.31.196.0/24", True, "AS112-v4"),
    ("192.52.193.0/24", True, "AMT"),
    ("192.88.99.0/24", None, "deprecated (6to4 relay anycast)"),
    ("192.88.99.2/32", False, "6a44 relay anycast"),
    ("192.168.0.0/16", False, "private use"),
    ("192.175.48.0/24", True, "direct delegation AS112 service"),
    ("198.18.0.0/15", False, "benchmarking"),
    ("198.51.100.0/24", False, "documentation (TEST-NET-2)"),
    ("203.0.113.0/24", False, "documentation (TEST-NET-3)"),
    ("240.0.0.0/4", False, "reserved"),
    ("255.255.255.255/32", False, "limited broadcast"),
    ("::1/128", False, "loopback"),
    ("::/128", False, "unspecified"),
    ("::ffff:0:0/96", False, "IPv4-mapped"),
    ("64:ff9b:1::/48", False, "IPv4-IPv6 translation for local use"),
    ("100::/64", False, "discard-only"),
    ("100:0:0:1::/64", False, "dummy IPv6 prefix"),
    ("2001::/23", False, "IETF protocol assignments"),
    ("2001::/32", None, "TEREDO"),
    ("2001:1::1/128", True, "port control protocol anycast"),
    ("2001:1::2/128", True, "traversal using relays around NAT anycast"),
    ("2001:1::3/128", True, "DNS-SD service registration protocol anycast"),
    ("2001:2::/48", False, "benchmarking"),
    ("2001:3::/32", True, "AMT"),
    ("2001:4:112::/48", True, "AS112-v6"),
    ("2001:10::/28", None, "deprecated (ORCHID)"),
    ("2001:20::/28", True, "ORCHIDv2"),
    ("2001:30::/28", True, "drone remote ID entity tags"),
    ("2001:db8::/32", False, "documentation"),
    ("2002::/16", None, "6to4"),
    ("2620:4f:8000::/48", True, "direct delegation AS112 service"),
    ("3fff::/20", False, "documentation"),
    ("5f00::/16", False, "segment routing (SRv6) SIDs"),
    ("fc00::/7", False, "unique local"),
    ("fe80::/10", False, "link-local unicast"),
    # Not in these registries, and not public either.
    ("224.0.0.0/4", None, "multicast"),
    ("::/96", None, "deprecated (IPv4-compatible)"),
    ("fec0::/10", None, "deprecated (site-local)"),
    ("ff00::/8", None, "multicast"),
    ("4000::/2", None, "not allocated"),
]
PUBLIC = [
    "1.1.1.1",
    "93.184.216.34",
    "172.15.255.255",
    "172.32.0.0",
    "192.0.1.0",
    "192.88.98.255",
    "192.88.100.0",
    "223.255.255.255",
    "2001:200::1",
    "2003::1",
    "2606:4700:4700::1111",
    "2a00:1450:4001:82a::200e",
]


def is_public(address: str) -> bool:
    try:
        check_public(ipaddress.ip_address(address), "a host")
    except ForbiddenAddress:
        return False
    return True


@pytest.mark.parametrize(("block", "reachable", "name"), REGISTRIES)
def test_no_block_that_is_not_globally_reachable_is_public(block: str, reachable: bool | None, name: str) -> None:
    network = ipaddress.ip_network(block)
    chosen = {network[0], network[network.num_addresses // 2], network[-1]}
    if reachable is not True:
        assert not any(is_public(str(address)) for address in chosen), name


@pytest.mark.parametrize("address", PUBLIC)
def test_neighbours_of_special_blocks_and_existing_servers_are_public(address: str) -> None:
    assert is_public(address)
    host = f"[{address}]" if ":" in address else address
    assert check_address(f"https://{host}/hook", ())


@pytest.mark.parametrize(("block", "reachable", "name"), [one for one in REGISTRIES if ":" not in one[0]])
def test_ipv6_with_an_embedded_ipv4_address_is_public_only_behind_nat64_if_that_is(
    block: str, reachable: bool | None, name: str
) -> None:
    inner = ipaddress.ip_network(block)[-1]
    words = f"{int(inner) >> 16:x}:{int(inner) & 0xFFFF:x}"
    assert is_public(f"64:ff9b::{words}") == is_public(str(inner)), name
    for form in (f"::ffff:{words}", f"::{words}", f"2002:{words}::1", f"2001:0:{words}::1", f"64:ff9b:1::{words}"):
        assert not is_public(form), name


@pytest.mark.parametrize("form", ["::ffff:{}", "::{}", "2002:{}::1", "2001:0:{}::1", "64:ff9b:1::{}"])
def test_even_a_public_ipv4_address_is_refused_through_a_relay(form: str) -> None:
    assert is_public("64:ff9b::5db8:d822")
    assert not is_public(form.format("5db8:d822"))
