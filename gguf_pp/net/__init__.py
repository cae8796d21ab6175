"""Connections between a client and its workers: addresses, secrets, deadlines, threads."""

from gguf_pp.net.address import Endpoint, is_remote, parse_endpoint
from gguf_pp.net.channel import Channel, dial
from gguf_pp.net.connect import connect
from gguf_pp.net.connection import Connection, Handler, Stats
from gguf_pp.net.handshake import Agreed, greet_client, greet_server, read_secret
from gguf_pp.net.listen import Listener
from gguf_pp.net.requests import Refused
from gguf_pp.net.tls import client_context, server_context

__all__ = [
    "Agreed",
    "Channel",
    "Connection",
    "Endpoint",
    "Handler",
    "Listener",
    "Refused",
    "Stats",
    "client_context",
    "connect",
    "dial",
    "greet_client",
    "greet_server",
    "is_remote",
    "parse_endpoint",
    "read_secret",
    "server_context",
]
