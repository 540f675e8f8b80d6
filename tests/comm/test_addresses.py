"""Where the store listens: on loopback for one host, on the address that the others use for several."""

import socket

import pytest

from phalanx.comm.addresses import is_loopback, listen, own_address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "LOCALHOST", "::1", "ip6-localhost"])
def test_what_can_only_mean_this_host(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "host0", "localhost.example.org", "0.0.0.0", "::", "fe80::1%eth0", "", "127.0.0.1.nip.io"]
)
def test_what_others_may_read_differently(host):
    assert not is_loopback(host)


def has(address):
    try:
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.9", "127.0.0.9"), ("::1", "::1")])
def test_it_listens_at_the_address_that_was_named(host, address):
    if not has(address):
        pytest.skip(f"no {address} here")
    with listen(host, 0, 4) as listener:
        assert listener.getsockname()[0] == address


def test_it_listens_at_the_address_in_the_network_of_the_job():
    address = own_address("", "192.0.2.1")  # of the default route; nothing is sent
    if is_loopback(address) or not has(address):
        pytest.skip("this host has no address but loopback")
    with listen(address, 0, 4) as listener:
        assert listener.getsockname()[0] == address


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_an_address_of_another_host_means_all_and_a_warning(host, caplog):
    with listen(host, 0, 4) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
    assert f"{host} is not an address of this host" in caplog.text
    assert "MASTER_ADDR" in caplog.text


def test_a_port_that_is_taken_is_an_error():
    with listen("127.0.0.1", 0, 4) as listener, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", listener.getsockname()[1], 4)
