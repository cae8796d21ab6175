"""`gguf-pp run` with a small model: what reaches stdout, and how it ends."""

import contextlib
import errno
import gc
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import gguf_pp
from gguf_pp.cli.main import main

WAIT_S = 60
GREEDY = ("--temp", "0", "-c", "256")


def run(capsys, model: str, *argv: str) -> tuple[int, str, str]:
    code = main(["run", model, *argv])
    return code, *capsys.readouterr()


def as_json(capsys, model: str, *argv: str) -> dict:
    code, out, _ = run(capsys, model, *argv, "--json")
    assert code == 0
    return json.loads(out)


def test_only_the_generated_text_is_on_stdout(capsys, chat_model):
    with gguf_pp.load(chat_model, ctx_size=256) as llm:
        expected = llm.generate("Hello", max_tokens=20, temperature=0).completion().text
    assert len(expected) == 20
    code, out, err = run(capsys, chat_model, "-p", "Hello", "-n", "20", *GREEDY)
    assert (code, out) == (0, expected)
    assert "Hello" not in err


@pytest.mark.parametrize("named", [False, True])
def test_gpus_that_nobody_named_are_pointed_out(named, capsys, chat_model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    flags = ("--device", "cpu") if named else ()
    _, _, err = run(capsys, chat_model, "-p", "Hello", "-n", "1", *GREEDY, *flags)
    told = "cuda:0,cuda:1 not used: --device names what is" in err.splitlines()
    assert told is not named


def test_stderr_shows_devices_context_pipelining_and_speed(capsys, chat_model):
    _, _, err = run(
        capsys, chat_model, "-p", "Hello", "-n", "5", *GREEDY, "--device", "cpu:0,cpu:1"
    )
    lines = [line for line in err.splitlines() if line]
    assert re.fullmatch(
        r"device +layers +kernels +weights +KV +buffers \(x2\) +free", lines[0].strip()
    )
    assert re.match(r"cpu:0 +0-\d ", lines[1])
    assert re.match(r"cpu:1 +\d-3 ", lines[2])
    assert lines[3:5] == ["n_ctx 256 of 65536", "pipelining on: 2 copies"]
    assert re.fullmatch(r"prompt +5 tokens +[\d.]+ tokens/s", lines[5])
    assert re.fullmatch(r"decode +4 tokens +[\d.]+ tokens/s", lines[6])
    assert len(lines) == 7


def test_garbage_is_collected_again_once_the_model_is_there_or_not(capsys, chat_model):
    assert run(capsys, chat_model, "-p", "Hello", "-n", "1", *GREEDY)[0] == 0
    assert gc.isenabled()
    assert run(capsys, chat_model, "-p", "Hello", "--layers", "1")[0] == 1
    assert gc.isenabled()


def test_why_pipelining_is_off_is_said_and_flags_without_effect_are_warned_of(capsys, chat_model):
    _, _, err = run(capsys, chat_model, "-p", "x", "-n", "1", *GREEDY, "-ngl", "99")
    assert "pipelining off: there is one device" in err.splitlines()
    assert "warning: -ngl has no effect: there is no GPU among the devices" in err.splitlines()


def test_json_has_the_documented_keys_and_the_same_text(capsys, chat_model):
    _, text, _ = run(capsys, chat_model, "-p", "Hello", "-n", "8", *GREEDY)
    got = as_json(capsys, chat_model, "-p", "Hello", "-n", "8", *GREEDY, "--device", "cpu:0,cpu:1")
    assert " ".join(got) == "text ids prompt_ids finish_reason timings devices n_copies pipeline"
    assert got["text"] == text
    assert got["finish_reason"] == "length"
    assert (len(got["ids"]), len(got["prompt_ids"])) == (8, 5)
    assert " ".join(got["timings"]) == (
        "load_s first_token_s prompt_tokens prompt_tokens_per_s decode_tokens decode_tokens_per_s"
    )
    assert (got["timings"]["prompt_tokens"], got["timings"]["decode_tokens"]) == (5, 7)
    first, second = got["devices"]
    assert " ".join(first) == "name layers weight_bytes kv_bytes buffer_bytes"
    assert (first["layers"][0], second["layers"][1]) == (0, 4)
    assert first["layers"][1] == second["layers"][0]
    assert got["n_copies"] == 2
    assert got["pipeline"] == {"enabled": True, "reason": None}


def test_json_without_pipelining_says_why(capsys, chat_model):
    got = as_json(capsys, chat_model, "-p", "x", "-n", "0", *GREEDY)
    assert got["pipeline"] == {"enabled": False, "reason": "there is one device"}
    assert (got["text"], got["ids"], got["finish_reason"]) == ("", [], "length")
    assert got["timings"]["first_token_s"] is None


def test_the_prompt_may_come_from_a_file_less_its_last_newline(capsys, chat_model, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"a\r\nb\n\n")
    got = as_json(capsys, chat_model, "-f", str(path), "-n", "1", *GREEDY)
    with gguf_pp.load(chat_model, ctx_size=64) as llm:
        assert got["prompt_ids"] == llm.tokenize("a\r\nb\n")


def test_control_tokens_are_parsed_only_when_asked(capsys, plain_model):
    plain = as_json(capsys, plain_model, "-p", "<|end|>", "-n", "1", *GREEDY)
    special = as_json(capsys, plain_model, "-p", "<|end|>", "-n", "1", *GREEDY, "--special")
    assert len(plain["prompt_ids"]) == 1 + len("<|end|>")
    assert len(special["prompt_ids"]) == 2


def test_a_stop_string_ends_the_text_and_is_not_shown(capsys, chat_model):
    _, text, _ = run(capsys, chat_model, "-p", "Hello", "-n", "20", *GREEDY)
    stop = text[6:9]
    got = as_json(capsys, chat_model, "-p", "Hello", *GREEDY, "-r", "never here", "--stop", stop)
    assert got["text"] == text[: text.index(stop)]
    assert got["finish_reason"] == "stop"


def test_the_same_seed_gives_the_same_text(capsys, chat_model):
    flags = ("-p", "Hello", "-n", "20", "-c", "64", "--temp", "2")
    first = run(capsys, chat_model, *flags, "-s", "5")[1]
    assert run(capsys, chat_model, *flags, "-s", "5", "--device", "cpu:0,cpu:1")[1] == first
    assert run(capsys, chat_model, *flags, "-s", "6")[1] != first


def test_one_turn_renders_the_template(capsys, chat_model, tmp_path):
    got = as_json(capsys, chat_model, "-p", "hi", "-sys", "be", "-st", "-n", "2", *GREEDY)
    with gguf_pp.load(chat_model, ctx_size=64) as llm:
        text = "<|system|>be<|end|><|user|>hi<|end|><|assistant|>"
        assert got["prompt_ids"] == llm.tokenize(text, special=True)
        raw = llm.tokenize("hi")
    source = "{{ messages[0].content }}"
    (tmp_path / "t.jinja").write_text(source)
    for flags in (("--chat-template", source), ("--chat-template-file", str(tmp_path / "t.jinja"))):
        got = as_json(capsys, chat_model, "-p", "hi", "-st", "-n", "2", *GREEDY, *flags)
        assert got["prompt_ids"] == raw


def test_a_template_must_be_there_and_work(capsys, chat_model, plain_model):
    code, out, err = run(capsys, plain_model, "-p", "x", "-cnv", *GREEDY)
    assert (code, out) == (1, "")
    assert "error: the model has no chat template" in err.splitlines()
    code, out, err = run(capsys, chat_model, "-p", "x", "-st", *GREEDY, "--chat-template", "chatml")
    assert (code, out) == (1, "")
    assert "error: the model has no chat template 'chatml'" in err.splitlines()
    assert " hint: its templates: default; or give the source of one" in err.splitlines()
    code, out, err = run(capsys, chat_model, "-p", "x", "-st", *GREEDY, "--chat-template", "{{ 1/0")
    assert (code, out) == (1, "")
    assert "error: the chat template does not compile" in err


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "gguf_pp", "run", *argv]


def test_lines_of_a_pipe_are_turns_of_a_chat_with_history(chat_model):
    done = subprocess.run(
        command(chat_model, "-cnv", "-n", "4", *GREEDY),
        input="one\n\ntwo\n/exit\nthree\n",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    with gguf_pp.load(chat_model, ctx_size=256) as llm:
        messages = []
        for said in ("one", "two"):
            messages.append({"role": "user", "content": said})
            prompt = llm.chat_prompt(messages)
            text = llm.generate(prompt, max_tokens=4, temperature=0).completion().text
            messages.append({"role": "assistant", "content": text})
    assert done.stdout == "".join(f"{m['content']}\n" for m in messages[1::2])
    assert ">" not in done.stderr


def test_a_reader_that_has_seen_enough_ends_the_generation(chat_model):
    with subprocess.Popen(
        command(chat_model, "-p", "x", "--temp", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(WAIT_S) == 0
    assert "Error" not in err


def interrupted(argv: list[str], ready: Callable[[subprocess.Popen[str]], str]) -> tuple[str, str]:
    """Send SIGINT once `ready` returns; what it returned and the rest of stdout, then stderr."""
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        timer = threading.Timer(WAIT_S, process.kill)
        timer.start()
        seen = ready(process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        timer.cancel()
    assert process.returncode == 130
    assert "Traceback" not in err
    return seen + out, err


def test_ctrl_c_ends_the_generation_and_keeps_what_was_made(chat_model):
    def text_has_come(process):
        return process.stdout.read(1)

    out, err = interrupted(command(chat_model, "-p", "Hello", "--temp", "0"), text_has_come)
    assert out
    assert out.isprintable()
    assert re.search(r"^decode +\d+ tokens", err, re.MULTILINE)


def test_ctrl_c_with_json_still_prints_the_object(chat_model):
    def generating(process):
        assert any(line.startswith("info: generating from") for line in process.stderr)
        return ""

    out, _ = interrupted(
        command(chat_model, "-p", "Hello", "--temp", "0", "--json", "-st", "-v"), generating
    )
    got = json.loads(out)
    assert got["finish_reason"] == "cancelled"
    assert len(got["text"]) == len(got["ids"])


# Nothing here listens to the first interrupt, as when the devices are busy with a long step.
BUSY = """
import signal
from gguf_pp.cli.generate import interruptible
class Busy:
    def interrupt(self):
        print("asked", flush=True)
with interruptible(Busy()):
    print("ready", flush=True)
    while True:
        signal.pause()
"""


def test_a_second_ctrl_c_ends_the_program_at_once():
    def asked(process):
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        return process.stdout.readline()

    assert interrupted([sys.executable, "-c", BUSY], asked) == ("asked\n", "")


# The first terminal that a new session opens is the one whose Ctrl-C it gets.
TAKE_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # which what a shell starts with & has ignored
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A process on a terminal of its own: what is typed, and what is seen."""

    def __init__(self, argv: list[str]) -> None:
        self._master, slave = pty.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        environ = {**os.environ, "TERM": "dumb", "COLUMNS": "120", "PYTHONFAULTHANDLER": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str) -> str:
        """Read until `text` is seen; return what came up to its end."""
        while text not in self.seen:
            assert self._read(), self.seen
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def wait_for_text(self) -> None:
        """Read until anything is seen."""
        while not self.seen:
            assert self._read()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self) -> tuple[int, str]:
        """Read the rest; the exit code and what was seen."""
        while self._read():
            pass
        os.close(self._master)
        return self._process.wait(WAIT_S), self.seen

    def _read(self) -> bool:
        if not select.select([self._master], [], [], WAIT_S)[0]:
            self._fail()
        try:
            raw = os.read(self._master, 4096)
        except OSError as exc:
            if exc.errno != errno.EIO:  # how Linux says that the other side is closed
                raise
            raw = b""
        self.seen += raw.decode().replace("\r\n", "\n")
        return bool(raw)

    def _fail(self) -> NoReturn:
        """Have the process tell where it stands."""
        status = Path(f"/proc/{self._process.pid}/status")
        signals = [line for line in status.read_text().splitlines() if line.startswith("S")]
        self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(OSError):
            while select.select([self._master], [], [], 2)[0] and self._read():
                pass
        pytest.fail(f"nothing came for {WAIT_S} s: {self.seen}\n{signals}")


def test_in_a_terminal_a_model_with_a_template_chats(chat_model):
    terminal = Terminal(command(chat_model, "-n", "4", *GREEDY))
    terminal.wait_for("\n> ")
    terminal.type("one\n")
    first = terminal.wait_for("\n> ").removesuffix("\n> ")
    terminal.type("two\n")
    second = terminal.wait_for("\n> ").removesuffix("\n> ")
    terminal.type("\x04")
    code, rest = terminal.end()
    assert code == 0
    assert (len(first), len(second)) == (4, 4)
    assert "decode       6 tokens" in rest


def test_ctrl_c_in_a_chat_ends_the_answer_then_the_program(chat_model):
    terminal = Terminal(command(chat_model, "--temp", "0"))
    terminal.wait_for("\n> ")
    terminal.type("one\n")
    terminal.wait_for_text()
    terminal.type("\x03")
    terminal.wait_for("\n> ")
    terminal.type("two\n")
    terminal.wait_for_text()
    terminal.type("\x03")
    terminal.wait_for("\n> ")
    terminal.type("\x03")
    code, rest = terminal.end()
    assert code == 130
    assert "Traceback" not in rest


def test_a_chat_goes_on_after_a_message_that_is_too_long(chat_model):
    terminal = Terminal(command(chat_model, "-n", "4", "--temp", "0", "-c", "64"))
    terminal.wait_for("\n> ")
    terminal.type("x" * 100 + "\n")
    assert "error: the prompt has" in terminal.wait_for("\n> ")
    terminal.type("short\n")
    assert len(terminal.wait_for("\n> ")) == 4 + len("\n> ")
    terminal.type("/exit\n")
    assert terminal.end()[0] == 0


@pytest.mark.parametrize("flags", [["-no-cnv"], []])
def test_a_terminal_without_a_chat_needs_a_prompt(chat_model, plain_model, flags):
    terminal = Terminal(command(chat_model if flags else plain_model, *flags, "-c", "64"))
    code, seen = terminal.end()
    assert code == 2
    assert "error: no prompt" in seen
