"""Deadlines of a connected socket, and what its failures are called."""

import os
import select
import socket
import threading
import time

import pytest

from gguf_pp.errors import RemoteError
from gguf_pp.net.channel import Channel, Expired, Lost, dial
from tests.sockets import SHORT_S, WAIT_S, in_thread, no_more_than, raw_pair, soon, take, usage

BIG = os.urandom(8 << 20)  # more than the kernel holds for a connection


@pytest.fixture
def pair():
    sock, other = raw_pair()
    channel = Channel(sock, "the peer")
    yield channel, other
    channel.close()
    other.close()


def test_parts_arrive_joined_and_in_order(pair):
    channel, other = pair
    matrix = memoryview(bytes(range(12))).cast("B", (3, 4))
    channel.send([b"ab", bytearray(b"cd"), b"", matrix], soon())
    assert other.recv(100) == b"abcd" + bytes(range(12))


def test_more_than_the_kernel_holds_arrives_whole_while_the_peer_reads(pair):
    channel, other = pair
    received = in_thread(take, other, 2 * len(BIG))
    channel.send([BIG, BIG], soon())
    assert received.get(timeout=WAIT_S) == BIG + BIG


def test_what_is_sent_at_once_and_what_is_left_add_up(pair):
    channel, other = pair
    received = in_thread(take, other, 3 + len(BIG))
    channel.send(channel.send_some([b"abc", BIG]), soon())
    assert received.get(timeout=WAIT_S) == b"abc" + BIG


def test_receiving_waits_for_every_byte(pair):
    channel, other = pair
    received = in_thread(channel.recv, 6, soon())
    for byte in b"abcdef":
        other.sendall(bytes([byte]))
    assert received.get(timeout=WAIT_S) == b"abcdef"


def test_a_silent_peer_expires(pair):
    channel, _ = pair
    before = time.monotonic()
    with pytest.raises(Expired, match="sent nothing"):
        channel.recv(1, soon(SHORT_S))
    assert SHORT_S <= time.monotonic() - before < WAIT_S


def test_what_has_arrived_is_read_even_after_the_deadline():
    sock, other = raw_pair()
    with other:
        channel = Channel(sock, "the peer")
        other.sendall(b"x")
        assert select.select([sock], [], [], WAIT_S)[0]
        assert channel.recv(1, soon(-1)) == b"x"
        channel.close()


def test_a_trickle_does_not_extend_the_deadline(pair):
    channel, other = pair
    over = threading.Event()

    def trickle():
        while not over.wait(SHORT_S / 10):
            other.sendall(b".")

    trickling = in_thread(trickle)
    with pytest.raises(Expired):
        channel.recv(1000, soon(SHORT_S))
    over.set()
    assert trickling.get(timeout=WAIT_S) is None


def test_a_peer_that_never_reads_expires(pair):
    channel, _ = pair
    with pytest.raises(Expired, match="took nothing"):
        channel.send([BIG], soon(SHORT_S))


def test_an_orderly_end_and_one_amid_the_bytes_are_told_apart(pair):
    channel, other = pair
    other.sendall(b"abc")
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(Lost, match="closed the connection in the middle of a frame"):
        channel.recv(4, soon())
    with pytest.raises(Lost, match=r"closed the connection$"):
        channel.recv(4, soon())


def test_a_reset_is_called_one(pair):
    channel, other = pair
    reset(other)
    with pytest.raises(Lost, match="reset the connection"):
        channel.recv(1, soon())


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


def test_sending_to_who_has_gone_is_lost(pair):
    channel, other = pair
    reset(other)
    with pytest.raises(Lost):
        channel.send([BIG], soon())
    with pytest.raises(Lost):
        channel.send_some([b"x"])


@pytest.mark.parametrize("call", [lambda c: c.recv(1, soon()), lambda c: c.send([BIG], soon())])
def test_shutdown_ends_what_another_thread_waits_for(pair, call):
    channel, _ = pair
    waiting = in_thread(call, channel)
    channel.shutdown()
    assert isinstance(waiting.get(timeout=WAIT_S), Lost)


def test_shutdown_and_close_may_be_repeated_in_any_order(pair):
    channel, _ = pair
    channel.shutdown()
    channel.shutdown()
    channel.close()
    channel.shutdown()
    channel.close()


def test_small_frames_do_not_wait_for_one_another_and_dead_links_are_probed(pair):
    sock, other = raw_pair()
    with other:
        channel = Channel(sock, "the peer")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        channel.close()


def has_v6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_v6(), reason="this machine has no IPv6")
def test_ipv6_addresses_work():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        channel = dial("::1", port, WAIT_S)
        accepted, _ = server.accept()
    with accepted:
        assert channel.peer == f"[::1]:{port}"
        channel.send([b"hello"], soon())
        assert accepted.recv(10) == b"hello"
    channel.close()


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_nobody_listening_is_an_error_that_names_the_peer_and_hints_at_the_worker():
    port = unused_port()
    with pytest.raises(RemoteError, match=f"127.0.0.1:{port} is unreachable: .*refused") as caught:
        dial("127.0.0.1", port, WAIT_S)
    assert "gguf-pp worker" in caught.value.hint


def test_a_name_that_does_not_exist_is_an_error_that_names_it():
    with pytest.raises(RemoteError, match=r"no-such-host\.invalid"):
        dial("no-such-host.invalid", 1, WAIT_S)


def test_an_address_that_answers_nothing_costs_its_timeout_only():
    # A full queue of connections lets no further one in.
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        with pytest.raises(RemoteError, match="unreachable: no answer in time"):
            dial("127.0.0.1", port, SHORT_S)
        for sock in waiting:
            sock.close()


def test_dialling_leaves_no_descriptor_behind():
    port = unused_port()
    before = usage()
    for _ in range(20):
        with pytest.raises(RemoteError):
            dial("127.0.0.1", port, WAIT_S)
    assert no_more_than(before)
