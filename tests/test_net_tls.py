"""Encrypted connections, with certificates made on the spot."""

import os
import shutil
import socket
import ssl
import subprocess

import pytest

from gguf_pp.errors import ConfigError, RemoteError
from gguf_pp.net import client_context, dial, greet_client, greet_server, server_context
from gguf_pp.net.channel import Channel, Expired, Lost
from gguf_pp.wire import HEADER, Verb
from tests.sockets import (
    LIVE_S,
    SHORT_S,
    WAIT_S,
    Recorder,
    channels,
    connections,
    eventually,
    in_thread,
    raw_pair,
    soon,
)

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="certificates are made with the openssl command"
)
SECRET = b"sixteen bytes or more"


def make_certificate(folder, names="IP:127.0.0.1", options=()):
    """A certificate that signs itself, as the README has users make one."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-days", "2", "-subj", "/CN=test"]
    command += ["-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *(options or ["-nodes"])], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def contexts(certificate):
    return server_context(*certificate), client_context(certificate[0])


def test_frames_of_all_sizes_go_both_ways_at_once(contexts):
    client, server = Recorder(), Recorder()
    payloads = [os.urandom(n) for n in (1, 100, 1 << 14, (1 << 14) + 1, 3 << 20, 1 << 23)]

    def send_all(connection):
        for _ in range(5):
            for i, payload in enumerate(payloads):
                connection.send(Verb.SUBMIT, i, b"meta", payload, wait=i % 2 == 0)

    with connections(client, server, tls=contexts) as both:
        sent = [in_thread(send_all, connection) for connection in both]
        for result in sent:
            assert result.get(timeout=WAIT_S) is None
        for handler in (client, server):
            for i in list(range(len(payloads))) * 5:
                frame, payload = handler.frame()
                assert (frame.id, frame.meta) == (i, b"meta")
                assert payload == payloads[i]


def test_heartbeats_keep_an_encrypted_connection_alive_and_close_ends_it(contexts):
    client, server = Recorder(), Recorder()
    with connections(client, server, timeout_s=LIVE_S, tls=contexts) as (a, b):
        eventually(lambda: b.stats.received_bytes >= 7 * HEADER.size)
        assert server.errors.empty()
        a.close()
        assert server.error() == "the client closed the connection"


def test_nothing_can_be_read_on_the_way(contexts):
    """A relay between the two sees no byte of the payload."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        sock, other = raw_pair()
        server = Channel(sock, "the client")
        serving = in_thread(server.start_tls, contexts[0], soon())
        dialled = in_thread(dial, "127.0.0.1", relay.getsockname()[1], WAIT_S, contexts[1])
        near, _ = relay.accept()
    seen = bytearray()

    def pass_on():
        while piece := near.recv(1 << 16):
            seen.extend(piece)
            other.sendall(piece)

    def pass_back():
        while piece := other.recv(1 << 16):
            near.sendall(piece)

    passing = [in_thread(pass_on), in_thread(pass_back)]
    client = dialled.get(timeout=WAIT_S)
    assert serving.get(timeout=WAIT_S) is None
    client.send([b"in plain sight " * 100], soon())
    assert server.recv(1500, soon()) == b"in plain sight " * 100
    for channel in (client, server):
        channel.shutdown()
        channel.close()
    for result in passing:
        result.get(timeout=WAIT_S)
    near.close()
    other.close()
    assert len(seen) > 1500
    assert b"plain sight" not in seen


def test_the_secret_is_proved_inside_tls(contexts):
    client, server = channels(*contexts)
    served = in_thread(greet_client, server, SECRET, WAIT_S)
    assert greet_server(client, SECRET, WAIT_S) == served.get(timeout=WAIT_S)
    client.close()
    server.close()


def refusal(server_tls, client_tls, host="127.0.0.1"):
    """What either side says when a connection does not come about: client, server."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            sock, _ = server.accept()
            channel = Channel(sock, "the client")
            try:
                if server_tls is not None:
                    channel.start_tls(server_tls, soon())
                greet_client(channel, None, WAIT_S)
            except (Lost, RemoteError) as exc:
                return str(exc)
            finally:
                channel.close()

        served = in_thread(serve)
        with pytest.raises(RemoteError) as caught:
            channel = dial(host, server.getsockname()[1], WAIT_S, client_tls)
            try:
                greet_server(channel, None, WAIT_S)
            finally:
                channel.close()
        return caught.value, served.get(timeout=WAIT_S)


def test_a_certificate_that_nobody_vouches_for_is_refused(contexts, tmp_path):
    stranger = client_context(make_certificate(tmp_path)[0])
    client, server = refusal(contexts[0], stranger)
    assert "its certificate does not verify: self-signed certificate" in str(client)
    assert "--tls-ca" in client.hint
    assert server.startswith("TLS failed:")


def test_a_certificate_for_another_name_is_refused(tmp_path):
    cert, key = make_certificate(tmp_path, names="DNS:another.host")
    client, _ = refusal(server_context(cert, key), client_context(cert))
    assert "its certificate does not verify: IP address mismatch" in str(client)


def test_an_encrypted_client_at_a_plain_port_is_told_what_it_found(contexts):
    client, server = refusal(None, contexts[1])
    assert ": no TLS: " in str(client)
    assert "--tls-cert" in client.hint
    assert server == "the client speaks TLS"


def test_a_plain_client_at_an_encrypted_port_is_told_what_it_found(contexts):
    client, server = refusal(contexts[0], None)
    assert str(client).endswith(("speaks TLS", "connection, before it said what it is"))
    assert "TLS" in str(client) + client.hint
    assert server.startswith("TLS failed:")


def test_older_versions_of_tls_are_not_spoken(contexts):
    contexts[1].minimum_version = contexts[1].maximum_version = ssl.TLSVersion.TLSv1_2
    client, _ = refusal(*contexts)
    assert "version" in str(client)


@pytest.mark.parametrize("raw", [b"", b"\x16\x03\x01\x02\x00"])
def test_silence_amid_the_tls_handshake_ends_at_its_deadline(contexts, raw):
    sock, other = raw_pair()
    with other:
        other.sendall(raw)
        channel = Channel(sock, "the client")
        with pytest.raises(Expired):
            channel.start_tls(contexts[0], soon(SHORT_S))
        channel.close()


def test_a_cut_ends_the_connection_like_any_other(contexts):
    client, server = channels(*contexts)
    client.send([b"abc"], soon())
    client.shutdown()
    client.close()
    with pytest.raises(Lost, match="closed the connection in the middle of a frame"):
        server.recv(4, soon())
    server.close()


def test_files_that_hold_no_certificate_or_key_are_config_errors_that_name_them(
    certificate, tmp_path
):
    cert, key = certificate
    text, none = tmp_path / "text.pem", tmp_path / "none.pem"
    text.write_text("text")
    other_key = make_certificate(tmp_path)[1]
    for wrong in ((none, key), (cert, none), (text, key), (cert, text), (cert, other_key)):
        with pytest.raises(ConfigError, match=r"--tls-cert .* --tls-key .*: ") as caught:
            server_context(*wrong)
        assert all(str(path) in str(caught.value) for path in wrong)
    for wrong in (none, text):
        with pytest.raises(ConfigError, match=r"--tls-ca .*: "):
            client_context(wrong)


def test_a_key_with_a_password_is_a_config_error_and_not_a_question(tmp_path):
    wrong = make_certificate(tmp_path, options=["-passout", "pass:word"])
    with pytest.raises(ConfigError, match="--tls-key"):
        server_context(*wrong)
