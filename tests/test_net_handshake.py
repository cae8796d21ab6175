"""Who may speak, and what each side is told when it may not."""

import hashlib
import hmac
import socket
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.errors import ConfigError, RemoteError
from gguf_pp.net.channel import Channel
from gguf_pp.net.handshake import OURS, Agreed, Versions, greet_client, greet_server, read_secret
from gguf_pp.wire import VERSION
from tests.sockets import SHORT_S, WAIT_S, channels, in_thread, raw_pair, soon, take

SECRET, OTHER = b"sixteen bytes or", b"more than sixteen bytes"
HELLO = struct.Struct("<4sHHQII32s8x")
NONCE = bytes(range(32))


def hello(first=VERSION, last=VERSION, *, features=0, timeout_ms=30_000, flags=0, magic=b"GGPP"):
    return HELLO.pack(magic, first, last, features, timeout_ms, flags, NONCE)


def proof(role: bytes, seen: bytes, secret: bytes = SECRET) -> bytes:
    return hmac.new(secret, role + seen, hashlib.sha256).digest()


def greet(client_secret, server_secret, client_versions=OURS, server_versions=OURS):
    """What each side makes of the other: Agreed, or its complaint."""
    client, server = channels()

    def serve():
        try:
            return greet_client(server, server_secret, WAIT_S, versions=server_versions)
        except RemoteError as exc:
            return str(exc)
        finally:
            server.close()

    served = in_thread(serve)
    try:
        got = greet_server(client, client_secret, WAIT_S, versions=client_versions)
    except RemoteError as exc:
        got = str(exc).replace(client.peer, "the worker")
    client.close()
    return got, served.get(timeout=WAIT_S)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_two_sides_with_the_same_secret_or_none_agree(secret):
    agreed = Agreed(VERSION, frozenset({"f16", "link"}), WAIT_S / 3)
    assert greet(secret, secret) == (agreed, agreed)


@pytest.mark.parametrize(
    ("client_secret", "server_secret", "client_says", "server_says"),
    [
        (
            OTHER,
            SECRET,
            "the worker did not accept our secret: it closed the connection",
            "the client has another secret",
        ),
        (
            None,
            SECRET,
            "the worker asks for a secret",
            "the client closed the connection, before it had shaken hands",
        ),
        (
            SECRET,
            None,
            "the worker has no secret, so it cannot prove that it is the worker you mean",
            None,
        ),
    ],
)
def test_with_different_secrets_each_side_says_what_is_wrong(
    client_secret, server_secret, client_says, server_says
):
    client, server = greet(client_secret, server_secret)
    assert client == client_says
    if server_says is not None:
        assert server == server_says


@pytest.mark.parametrize(
    ("client", "server", "settled"),
    [((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 9), (9, 9), 9), ((4, 4), (4, 4), 4)],
)
def test_the_highest_version_that_both_speak_is_used(client, server, settled):
    both = greet(None, None, Versions(*client), Versions(*server))
    assert [agreed.version for agreed in both] == [settled, settled]


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize(
    ("client", "server", "client_range", "server_range"),
    [((1, 3), (4, 6), "1 to 3", "4 to 6"), ((7, 7), (4, 6), "7", "4 to 6")],
)
def test_without_a_common_version_both_sides_print_both_ranges(
    secret, client, server, client_range, server_range
):
    assert greet(secret, secret, Versions(*client), Versions(*server)) == (
        f"the worker speaks protocol {server_range}, this side speaks {client_range}",
        f"the client speaks protocol {client_range}, this side speaks {server_range}",
    )


def serve(raw: bytes, secret: bytes | None = None, deadline_s: float = WAIT_S) -> str | Agreed:
    """What a server makes of these bytes, after which the client says no more."""
    sock, other = raw_pair()
    server = Channel(sock, "the client")
    other.sendall(raw)
    other.shutdown(socket.SHUT_WR)
    try:
        return greet_client(server, secret, WAIT_S, deadline=soon(deadline_s))
    except RemoteError as exc:
        return str(exc)
    finally:
        server.close()
        other.close()


def test_unknown_features_and_flags_of_a_newer_peer_do_no_harm():
    agreed = serve(hello(features=0xFFFF_FFFF_FFFF_FFFE, flags=0xFFFF_FFFF, last=99))
    assert agreed == Agreed(VERSION, frozenset({"link"}), 10.0)


@pytest.mark.parametrize(
    ("own_s", "their_ms", "heartbeat_s"), [(30, 6000, 2), (3, 60_000, 1), (30, 0, 0.1 / 3)]
)
def test_heartbeats_suit_the_less_patient_side(own_s, their_ms, heartbeat_s):
    sock, other = raw_pair()
    with other:
        other.sendall(hello(timeout_ms=their_ms))
        agreed = greet_client(Channel(sock, "the client"), None, own_s, deadline=soon())
        sock.close()
    assert agreed.heartbeat_s == pytest.approx(heartbeat_s)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"GET / HTTP/1.1\r\nHost: box\r\n\r\n", "the client speaks HTTP"),
        (b"POST /v1/chat/completions", "the client speaks HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "the client speaks TLS"),
        (b"SSH-2.0-OpenSSH", "the client does not speak the protocol of gguf-pp"),
        (b"", "the client closed the connection, before it had shaken hands"),
        (hello()[:63], "the client closed the connection in the middle of a frame, before"),
        (hello(magic=b"GGUF"), "the client does not speak the protocol of gguf-pp"),
        (hello(0, 0), f"the client speaks protocol 0, this side speaks {VERSION}"),
        (hello(9, 8), f"the client speaks protocol 9 to 8, this side speaks {VERSION}"),
    ],
)
def test_a_stranger_is_told_from_a_client_by_its_first_bytes(raw, complaint):
    assert serve(raw).startswith(complaint)


def test_a_stranger_is_refused_before_it_has_said_more_than_four_bytes():
    sock, other = raw_pair()
    with other:
        other.sendall(b"GET ")
        with pytest.raises(RemoteError, match="speaks HTTP"):
            greet_client(Channel(sock, "the client"), None, WAIT_S)
        sock.close()


@pytest.mark.parametrize(
    "raw", [b"", b"GG", hello()[:50]], ids=["silence", "half a magic", "50 bytes"]
)
def test_who_says_no_more_is_given_up_at_the_deadline(raw):
    sock, other = raw_pair()
    with other:
        other.sendall(raw)
        before = time.monotonic()
        with pytest.raises(RemoteError, match="the client sent nothing, before it had shaken"):
            greet_client(Channel(sock, "the client"), None, WAIT_S, deadline=soon(SHORT_S))
        assert time.monotonic() - before < WAIT_S
        sock.close()


@given(st.binary(max_size=200), st.sampled_from([None, SECRET]))
@settings(max_examples=60)
def test_random_bytes_are_refused_in_words(raw, secret):
    assert isinstance(serve(raw, secret), str)


@given(st.integers(0, 95), st.integers(0, 255))
@settings(max_examples=100)
def test_no_changed_byte_of_a_hello_or_a_proof_gets_in(place, byte):
    """The server's nonce is fresh, so not even the unchanged proof would."""
    raw = bytearray(hello() + proof(b"client", hello() + hello(flags=1)))
    raw[place] = byte
    assert isinstance(serve(bytes(raw), SECRET), str)


def test_a_proof_that_was_overheard_is_worth_nothing_on_another_connection():
    overheard = []
    for _ in range(2):
        sock, other = raw_pair()
        served = in_thread(greet_client, Channel(sock, "the client"), SECRET, WAIT_S)
        other.sendall(hello())
        answer = take(other, HELLO.size)
        overheard.append(proof(b"client", hello() + answer))
        other.sendall(overheard[0])
        result = served.get(timeout=WAIT_S)
        sock.close()
        other.close()
    assert str(result) == "the client has another secret"


def pretend(flags: int, answer) -> str:
    """What a client with the secret says to a server that answers `answer(both hellos, proof)`."""
    sock, other = raw_pair()
    greeted = in_thread(greet_server, Channel(sock, "the worker"), SECRET, WAIT_S)
    seen = take(other, HELLO.size) + hello(flags=flags)
    other.sendall(hello(flags=flags))
    if flags:
        other.sendall(answer(seen, take(other, 32)))
    result = greeted.get(timeout=WAIT_S)
    sock.close()
    other.close()
    assert isinstance(result, RemoteError | Agreed)
    return str(result) if isinstance(result, RemoteError) else "agreed"


def test_a_server_proves_the_secret_over_all_that_was_said():
    assert pretend(1, lambda seen, sent: proof(b"server", seen + sent)) == "agreed"


@pytest.mark.parametrize(
    "answer",
    [
        lambda seen, sent: bytes(32),
        lambda seen, sent: sent,
        lambda seen, sent: proof(b"client", seen + sent),
        lambda seen, sent: proof(b"server", seen),
        lambda seen, sent: proof(b"server", seen + sent, OTHER),
    ],
    ids=["zeros", "our own proof", "in the role of a client", "without our proof", "wrong secret"],
)
def test_a_server_that_only_pretends_to_know_the_secret_is_refused(answer):
    assert pretend(1, answer) == "the worker does not know our secret"


def test_a_server_that_asks_for_no_proof_is_refused_by_who_has_a_secret():
    assert "it cannot prove that it is the worker you mean" in pretend(0, None)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "the worker speaks HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x32", "the worker speaks TLS"),
        (b"220 mail ESMTP", "the worker does not speak the protocol of gguf-pp"),
        (b"", "the worker closed the connection, before it said what it is"),
    ],
)
def test_a_client_that_dials_something_else_says_so(answer, complaint):
    sock, other = raw_pair()
    other.sendall(answer)
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(RemoteError) as caught:
        greet_server(Channel(sock, "the worker"), None, WAIT_S)
    assert str(caught.value) == complaint
    assert caught.value.hint
    sock.close()
    other.close()


def test_a_secret_is_read_from_its_file_without_the_white_space_around_it(tmp_path, caplog):
    path = tmp_path / "secret"
    path.write_bytes(b"  a secret with inner spaces \r\n")
    path.chmod(0o600)
    assert read_secret(path, {"GGUF_PP_SECRET": "not this one either"}) == (
        b"a secret with inner spaces"
    )
    assert not caplog.records


def test_a_secret_is_read_from_the_environment_if_there_is_no_file():
    assert read_secret(None, {"GGUF_PP_SECRET": "0123456789abcdef\n"}) == b"0123456789abcdef"
    assert read_secret(None, {}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_secret_that_others_can_read_is_used_with_a_warning(tmp_path, caplog, mode):
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(mode)
    assert read_secret(path) == SECRET
    assert [r.message for r in caplog.records] == [
        f"{path}: others can read this secret; chmod 600 it"
    ]


@pytest.mark.parametrize("text", ["", "0123456789abcde", " " * 20, "x" * 4097])
def test_a_secret_that_is_too_short_or_too_long_is_a_config_error(tmp_path, text):
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    for call in (lambda: read_secret(path), lambda: read_secret(None, {"GGUF_PP_SECRET": text})):
        with pytest.raises(ConfigError, match="bytes, not of 16 to 4096") as caught:
            call()
        assert text not in str(caught.value) or not text.strip()


def test_a_secret_file_that_cannot_be_read_is_a_config_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"--secret-file .*none: No such file"):
        read_secret(tmp_path / "none")
