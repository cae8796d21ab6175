"""Workers and clients that die or hang at the worst moments: real processes, real signals."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import gguf_pp
from gguf_pp.errors import RemoteError
from tests.light import MOMENTS, Light
from tests.nursery import ROOT, nursery
from tests.prepared import whole
from tests.sockets import eventually
from tests.watchdog import watchdog

TIMEOUT_S = 2.0
SLACK_S = 10.0
"""A machine that is busy with other things may take this much longer to notice."""
PROMPT = "Once upon a time"
LONG = PROMPT * 20
OPTIONS = {"ctx_size": 512, "ubatch_size": 4, "timeout": TIMEOUT_S}
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]


@pytest.fixture(autouse=True)
def no_hang():
    with watchdog(120):
        yield


@pytest.fixture(scope="module")
def nurse(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


@pytest.fixture(scope="module")
def pair(nurse):
    # Their own patience is not tried here: a busy machine may keep a client silent for a while.
    flags = ("--timeout", "15", "--memory", "1GiB")
    started = nurse.worker(*flags), nurse.worker(*flags)
    yield started
    for worker in started:
        assert "Traceback" not in worker.log()


@pytest.fixture(scope="module")
def here(chat_model):
    """What a run on this machine answers."""
    with gguf_pp.load(chat_model, ["cpu"], ctx_size=512) as llm:
        return {text: answer(llm, text) for text in (PROMPT, LONG)}


def answer(llm, text=PROMPT):
    return llm.generate(text, max_tokens=24, temperature=0).completion().text


@pytest.fixture(params=["alone", "first of two", "second of two"])
def scene(request, pair):
    """Devices, and the worker among them that will fail. It is there again afterwards."""
    a, b = pair
    victim = b if request.param == "second of two" else a
    yield (["cpu", a.device] if request.param == "alone" else [a.device, b.device]), victim
    victim.restart()


@contextmanager
def failing(worker, doing=""):
    """What is inside fails in time, and says who is to blame."""
    start = time.monotonic()
    with pytest.raises(RemoteError, match=worker.address) as caught:
        yield
    assert time.monotonic() - start < TIMEOUT_S + SLACK_S
    assert doing in str(caught.value)


def strike(worker, number):
    worker.send(number)
    if number == signal.SIGKILL:
        worker.wait()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_worker_lost_while_loading_fails_the_load_and_the_next_one_works(
    number, scene, chat_model, here
):
    devices, victim = scene
    struck = []

    def progress(done, total):
        if not struck:
            struck.append(True)
            strike(victim, number)

    with failing(victim, "layers"):
        gguf_pp.load(chat_model, devices, progress=progress, **OPTIONS)
    victim.restart()
    with gguf_pp.load(chat_model, devices, **OPTIONS) as llm:
        assert answer(llm) == here[PROMPT]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_worker_lost_in_a_prompt_fails_that_request_only(number, scene, chat_model, here):
    devices, victim = scene
    with gguf_pp.load(chat_model, devices, **OPTIONS) as llm:
        submit, count = llm._pipeline.executor.submit, 0

        def submit_and_strike(ubatch, take):
            nonlocal count
            count += 1
            if count == 6:
                strike(victim, number)
            return submit(ubatch, take)

        llm._pipeline.executor.submit = submit_and_strike
        failed = llm.generate(LONG, max_tokens=4)
        waiting = llm.generate(LONG, max_tokens=24, temperature=0)
        with failing(victim, "computing layers"):
            failed.completion()
        victim.restart()
        try:
            assert waiting.completion().text == here[LONG]
        except RemoteError as exc:  # its turn came before the worker was back
            assert f"{victim.address} is unreachable" in str(exc) or number == signal.SIGSTOP
        assert answer(llm) == here[PROMPT]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_worker_lost_while_generating_fails_that_request_only(number, scene, chat_model, here):
    devices, victim = scene
    with gguf_pp.load(chat_model, devices, **OPTIONS) as llm:
        failed = llm.generate(PROMPT, temperature=0)
        waiting = llm.generate(PROMPT, max_tokens=24, temperature=0)
        text = "".join(next(failed) for _ in range(8))
        strike(victim, number)
        with failing(victim):
            for piece in failed:
                text += piece
        assert here[PROMPT].startswith(text[:24])
        if number == signal.SIGKILL:
            with failing(victim, "unreachable"):
                waiting.completion()
            with failing(victim, "unreachable"):
                answer(llm)
        victim.restart()
        assert answer(llm) == here[PROMPT]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_worker_lost_while_nothing_runs_is_not_missed_once_it_is_back(
    number, scene, chat_model, here
):
    devices, victim = scene
    with gguf_pp.load(chat_model, devices, **OPTIONS) as llm:
        assert answer(llm) == here[PROMPT]
        strike(victim, number)
        eventually(lambda: llm._pipeline.failure is not None)
        victim.restart()
        assert answer(llm) == here[PROMPT]
        assert answer(llm, LONG) == here[LONG]


def test_a_loss_is_known_as_soon_as_sending_would_say_so(pair, chat_model, monkeypatch):
    worker, told = pair[0], threading.Event()
    with gguf_pp.load(chat_model, ["cpu", worker.device], **OPTIONS) as llm:
        [stage] = llm._pipeline.remote_stages
        lost = stage.peer.lost
        monkeypatch.setattr(stage.peer, "lost", lambda error: told.wait(60) and lost(error))
        strike(worker, signal.SIGKILL)
        eventually(lambda: llm._pipeline.failure is not None)
        told.set()
        with failing(worker, "unreachable"):
            answer(llm)
        worker.restart()


@pytest.fixture(scope="module")
def prepared(chat_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared") / "whole.json"
    path.write_text(json.dumps(whole(chat_model)))
    return path


def take_and_die(worker, prepared, moment):
    """A client of its own process that kills itself at `moment`."""
    command = [sys.executable, "-m", "tests.light", worker.address, str(prepared), moment]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == -signal.SIGKILL


def state_of(worker):
    """Threads, open files, and resident bytes of a worker."""
    process = Path(f"/proc/{worker.pid}")
    status = process.joinpath("status").read_text()
    n_threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10
    return n_threads, len(list(process.joinpath("fd").iterdir())), resident


def settled(worker, free_bytes):
    """Wait until the worker has all its memory back; its state then."""
    watcher = Light(worker.address)
    eventually(lambda: watcher.free_bytes() == free_bytes)
    watcher.close()
    return state_of(worker)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_client_that_is_killed_leaves_nothing_behind(moment, pair, prepared, chat_model, here):
    worker = pair[0]
    watcher = Light(worker.address)
    free = watcher.free_bytes()
    take_and_die(worker, prepared, moment)
    eventually(lambda: watcher.free_bytes() == free)
    watcher.close()
    with gguf_pp.load(chat_model, ["cpu", worker.device], **OPTIONS) as llm:
        assert answer(llm) == here[PROMPT]


def test_a_real_client_that_is_killed_leaves_nothing_behind(nurse, pair, chat_model, here):
    worker = pair[0]
    watcher = Light(worker.address)
    free = watcher.free_bytes()
    flags = ["-m", chat_model, "--device", worker.device, "-p", PROMPT, "-no-cnv", "-c", "60000"]
    client = nurse.run("run", *flags, "--temp", "0")
    client.wait_for(re.escape(here[PROMPT][:8]), "out")
    assert watcher.free_bytes() < free
    client.kill()
    eventually(lambda: watcher.free_bytes() == free)
    watcher.close()


def many_rounds(worker, prepared, n_warm, n, grown_bytes):
    """Clients that connect, load and die; after some of them the worker grows no more."""
    watcher = Light(worker.address)
    free = watcher.free_bytes()
    watcher.close()
    before = (sys.maxsize, sys.maxsize, 0)
    for i in range(n_warm + n):
        take_and_die(worker, prepared, MOMENTS[i % 4])
        n_threads, n_files, resident = settled(worker, free)
        if i < n_warm:  # torch and malloc have what they keep; of the ends of sessions not all
            before = min(before[0], n_threads), min(before[1], n_files), resident
    eventually(lambda: state_of(worker)[:2] <= before[:2])
    assert state_of(worker)[2] < before[2] + grown_bytes


def test_rounds_of_connecting_loading_and_dying_leave_the_worker_as_it_was(pair, prepared):
    many_rounds(pair[1], prepared, 4, 8, 24 << 20)


@pytest.mark.slow
def test_a_hundred_rounds_leave_the_worker_as_it_was(pair, prepared):
    with watchdog(900):
        many_rounds(pair[1], prepared, 28, 100, 8 << 20)
