"""Names of devices elsewhere, as typed."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gguf_pp.errors import ConfigError
from gguf_pp.net import Endpoint, is_remote, parse_endpoint


@pytest.mark.parametrize(
    ("text", "host", "port", "device", "shown"),
    [
        ("tcp://box:50052", "box", 50052, None, "tcp://box:50052"),
        ("tcp://box.lan:1/cpu:1", "box.lan", 1, "cpu:1", "tcp://box.lan:1/cpu:1"),
        ("tcp://10.0.0.2:65535/cuda:0", "10.0.0.2", 65535, "cuda:0", "tcp://10.0.0.2:65535/cuda:0"),
        ("tcp://[::1]:50052/cpu", "::1", 50052, "cpu", "tcp://[::1]:50052/cpu"),
        ("tcp://[fe80::1%eth0]:5", "fe80::1%eth0", 5, None, "tcp://[fe80::1%eth0]:5"),
        ("rpc:box:50052", "box", 50052, None, "tcp://box:50052"),
        ("rpc://box:50052/", "box", 50052, None, "tcp://box:50052"),
    ],
)
def test_an_endpoint_is_read_and_written(text, host, port, device, shown):
    endpoint = parse_endpoint(text)
    assert endpoint == Endpoint(host, port, device)
    assert str(endpoint) == shown
    assert parse_endpoint(shown) == endpoint


def test_the_peer_is_the_worker_without_its_device():
    assert parse_endpoint("tcp://box:1/cpu:0").peer == "box:1"
    assert parse_endpoint("tcp://[::1]:1/cpu:0").peer == "[::1]:1"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not the address of a worker"),
        ("box:50052", "not the address of a worker"),
        ("tcp://box", "not the address of a worker"),
        ("tcp://::1:50052", "not the address of a worker"),
        ("tcp://box:50052x", "not the address of a worker"),
        ("tcp://box:50052/cpu:1\n", "not the address of a worker"),
        ("tcp://:50052", "'' is not the name of a host"),
        ("tcp://a b:50052", "'a b' is not the name of a host"),
        ("tcp://-v:50052", "'-v' is not the name of a host"),
        ("tcp://[box]:50052", "'box' is not an IPv6 address"),
        ("tcp://box:0", "port 0 is not from 1 to 65535"),
        ("tcp://box:65536", "port 65536 is not from 1 to 65535"),
        ("tcp://box:1/../cpu", "'../cpu' is not a device"),
    ],
)
def test_what_is_no_endpoint_is_a_config_error_that_says_why(text, complaint):
    with pytest.raises(ConfigError) as caught:
        parse_endpoint(text)
    assert complaint in str(caught.value)


def test_remote_names_are_told_from_local_ones():
    assert [is_remote(name) for name in ("tcp://a:1", "rpc:a:1", "cpu", "cpu:1", "cuda:0")] == [
        True,
        True,
        False,
        False,
        False,
    ]


@given(st.text(alphabet="tcp:/[]%.0129a-z\n\x00 ", max_size=30))
@example("tcp://[::1%]:1")
@example("tcp://[fe80::1%a]b]:1")
def test_any_text_is_an_endpoint_that_survives_or_a_config_error(text):
    for scheme in ("", "tcp://", "rpc:"):
        try:
            endpoint = parse_endpoint(scheme + text)
        except ConfigError:
            continue
        assert parse_endpoint(str(endpoint)) == endpoint
