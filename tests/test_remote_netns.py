"""Three hosts, as network namespaces that a bridge joins: a client and two workers."""

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.nursery import ROOT
from tests.watchdog import watchdog

TIMEOUT_S = 5
DELAY_MS = 5
CLIENT = """
import json, sys, time
import gguf_pp
from gguf_pp.errors import RemoteError
model, secret, timeout_s, a, b = sys.argv[1:]
options = {"ctx_size": 512, "parallel": 4, "ubatch_size": 16, "timeout": float(timeout_s),
           "secret_file": secret}
prompts = ["Once upon a time", "Hello", "1, 2, 3, 4,", "The sun"]

def everything(llm):
    four = llm.generate_batch(prompts, max_tokens=8, seed=7)
    likely = llm.log_probabilities(llm.tokenize(prompts[0] * 20))[0]
    return [(c.text, c.ids) for c in four], likely.tolist()

def say(value):
    print(json.dumps(value), flush=True)

with gguf_pp.load(model, ["cpu"], **options) as llm:
    here = everything(llm)
    alone = llm.generate(prompts[0], max_tokens=40, temperature=0).completion().text
for n_copies, devices in ((1, ["cpu", a]), (4, [a, b]), (2, ["cpu", a, b]), (4, [b, "cpu", a])):
    with gguf_pp.load(model, devices, n_copies=n_copies, **options) as llm:
        say(everything(llm) == here)
with gguf_pp.load(model, [a, b], **options) as llm:
    say(llm.generate(prompts[0], max_tokens=40, temperature=0).completion().text == alone)
    generation = llm.generate(prompts[0], temperature=0)
    next(generation)
    say("generates")
    sys.stdin.readline()
    start = time.monotonic()
    try:
        generation.completion()
    except RemoteError as exc:
        say([str(exc), time.monotonic() - start])
    sys.stdin.readline()
    say(llm.generate(prompts[0], max_tokens=40, temperature=0).completion().text == alone)
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """Namespaces c, a and b with 10.77.0.1 to 3, and one for the bridge between them."""

    def __init__(self, stack):
        self._prefix = f"ggpp{os.getpid()}"
        hub = self._add("hub", stack)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for i, name in enumerate("cab", 1):
            space = self._add(name, stack)
            end = ["peer", "name", name, "netns", hub]
            ip("link", "add", "eth", "netns", space, "type", "veth", *end)
            ip("-n", hub, "link", "set", "dev", name, "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"10.77.0.{i}/24", "dev", "eth")
            ip("-n", space, "link", "set", "eth", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def _add(self, name, stack):
        ip("netns", "add", self.space(name))
        stack.callback(ip, "netns", "del", self.space(name))
        return self.space(name)

    def space(self, name):
        return f"{self._prefix}{name}"

    def delay(self):
        """Let every packet take its time, if this kernel can."""
        for name in "cab":
            command = ["tc", "-n", self.space(name), "qdisc", "add", "dev", "eth", "root", "netem"]
            subprocess.run([*command, "delay", f"{DELAY_MS}ms"], check=False, capture_output=True)

    def cable(self, name, state):
        """Plug the cable of a host in ("up") or out ("down")."""
        ip("-n", self.space("hub"), "link", "set", "dev", name, state)

    def run(self, stack, name, *command):
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.space(name), sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )

        def end():
            process.kill()
            process.communicate()

        stack.callback(end)
        return process


@pytest.fixture(scope="module")
def hosts():
    with ExitStack() as stack:
        try:
            made = Hosts(stack)
        except FileNotFoundError:
            pytest.skip("there is no ip command")
        except subprocess.CalledProcessError as exc:
            pytest.skip(f"network namespaces are not permitted: {exc.stderr.decode().strip()}")
        made.delay()
        yield made


def test_hosts_on_a_network_generate_what_one_does_and_survive_a_pulled_cable(
    hosts, chat_model, tmp_path
):
    secret = tmp_path / "secret"
    secret.write_text("a secret of sixteen bytes or more")
    secret.chmod(0o600)
    with watchdog(240), ExitStack() as stack:
        common = ["-m", "gguf_pp", "worker", "-p", "50052", "--secret-file", str(secret)]
        common += ["--cache-size", "0", "--cache", str(tmp_path), "--timeout", str(TIMEOUT_S)]
        workers = {
            name: hosts.run(stack, name, *common, "-H", f"10.77.0.{i}")
            for i, name in ((2, "a"), (3, "b"))
        }
        for worker in workers.values():
            while not re.match("listening on", line := worker.stdout.readline()):
                assert line, "it ended"
        ends = ["tcp://10.77.0.2:50052", "tcp://10.77.0.3:50052"]
        client = hosts.run(stack, "c", "-c", CLIENT, chat_model, str(secret), str(TIMEOUT_S), *ends)

        def heard():
            return json.loads(client.stdout.readline())

        def go_on():
            client.stdin.write("\n")
            client.stdin.flush()

        assert [heard() for _ in range(5)] == [True] * 5
        assert heard() == "generates"
        hosts.cable("b", "down")
        go_on()
        message, seconds = heard()
        assert "10.77.0.3:50052" in message
        assert seconds < TIMEOUT_S + 10
        hosts.cable("b", "up")
        go_on()
        assert heard()
        assert client.wait(60) == 0
