"""`gguf-pp worker` from the command line: who is let in, what is said, how it ends."""

import json
import re
import shutil
import signal

import pytest

import gguf_pp
from gguf_pp.cli.main import main
from gguf_pp.errors import PlacementError, RemoteError
from tests.light import Light
from tests.nursery import nursery
from tests.prepared import whole
from tests.sockets import eventually
from tests.test_net_tls import make_certificate
from tests.watchdog import watchdog

PROMPT = "Once upon a time"
SECRET = "a secret of more than sixteen bytes"
OTHER = "another one of more than sixteen bytes"


@pytest.fixture(autouse=True)
def no_hang():
    with watchdog(120):
        yield


@pytest.fixture(scope="module")
def nurse(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


@pytest.fixture
def start(nurse):
    """Start workers, which are ended afterwards and have shown no traceback."""
    made = []

    def begin(*flags):
        made.append(nurse.worker(*flags))
        return made[-1]

    yield begin
    for worker in made:
        worker.kill()
        assert "Traceback" not in worker.log()


@pytest.fixture(scope="module")
def plain(nurse):
    return nurse.worker()


def secret_file(folder, secret=SECRET):
    path = folder / f"{secret.split()[0]}.secret"
    path.write_text(secret + "\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def here(chat_model):
    with gguf_pp.load(chat_model, ["cpu"], ctx_size=128) as llm:
        return llm.generate(PROMPT, max_tokens=8, temperature=0).completion().text


def run(capsys, *args):
    """Exit code, stdout and stderr of the command line, in this process."""
    code = main(args)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def generate(capsys, model, worker, *flags):
    what = ["-p", PROMPT, "-n", "8", "-no-cnv", "--temp", "0", "-c", "128"]
    return run(capsys, "run", "-m", model, "--device", worker.device, *what, *flags)


def assert_refused(result, *wanted):
    """One error line with all that is wanted in it, a hint, and nothing on stdout."""
    code, out, err = result
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out, len(errors)) == (1, "", 1), err
    assert " hint: " in err
    for text in wanted:
        assert text in err


@pytest.mark.parametrize("name", ["worker", "rpc-server", "remote-backend"])
def test_without_a_secret_other_machines_are_kept_out(name, capsys):
    result = run(capsys, name, "-H", "0.0.0.0", "-p", "0", "--cache-size", "0")
    assert_refused(result, "-H 0.0.0.0 lets other machines in", "--secret-file")


def test_a_secret_that_is_too_short_is_refused(capsys, tmp_path):
    result = run(capsys, "worker", "-p", "0", "--secret-file", secret_file(tmp_path, "short"))
    assert_refused(result, "a secret of 5 bytes")


def test_with_the_same_secret_on_both_sides_other_machines_may_come(
    start, capsys, tmp_path, chat_model, here, monkeypatch
):
    worker = start("-H", "0.0.0.0", "--secret-file", secret_file(tmp_path))
    assert "with a secret, not encrypted" in (worker.folder / "out").read_text()
    worker.address = worker.address.replace("0.0.0.0", "127.0.0.1")
    flags = ["--secret-file", secret_file(tmp_path)]
    code, out, _ = generate(capsys, chat_model, worker, *flags)
    assert (code, out) == (0, here)
    monkeypatch.setenv("GGUF_PP_SECRET", SECRET)
    code, out, _ = generate(capsys, chat_model, worker)
    assert (code, out) == (0, here)
    monkeypatch.delenv("GGUF_PP_SECRET")
    assert_refused(generate(capsys, chat_model, worker), worker.address, "asks for a secret")
    flags = ["--secret-file", secret_file(tmp_path, OTHER)]
    result = generate(capsys, chat_model, worker, *flags)
    assert_refused(result, worker.address, "did not accept our secret")
    worker.wait_for("has another secret")
    assert SECRET not in worker.log() + result[2]


def test_a_client_with_a_secret_believes_no_worker_without_one(capsys, plain, tmp_path, chat_model):
    result = generate(capsys, chat_model, plain, "--secret-file", secret_file(tmp_path))
    assert_refused(result, plain.address, "has no secret")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_encrypted_from_end_to_end(start, plain, capsys, tmp_path, chat_model, here):
    cert, key = make_certificate(tmp_path)
    flags = ("--secret-file", secret_file(tmp_path))
    worker = start("--tls-cert", str(cert), "--tls-key", str(key), *flags)
    assert "with a secret, encrypted" in (worker.folder / "out").read_text()
    trust = ("--tls-ca", str(cert))
    code, out, _ = generate(capsys, chat_model, worker, *flags, *trust)
    assert (code, out) == (0, here)
    assert_refused(generate(capsys, chat_model, worker, *flags), worker.address)
    assert_refused(generate(capsys, chat_model, plain, *trust), plain.address, "no TLS")
    (tmp_path / "other").mkdir()
    stranger = make_certificate(tmp_path / "other")[0]
    result = generate(capsys, chat_model, worker, *flags, "--tls-ca", str(stranger))
    assert_refused(result, worker.address, "does not verify")
    code, out, _ = run(capsys, "worker", "--check", worker.address, *flags, *trust)
    assert code == 0
    assert "a secret was proved both ways, encrypted" in out


def test_two_encrypted_workers_reach_each_other(start, tmp_path, chat_model, here):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    cert, key = map(str, make_certificate(tmp_path))
    secret = secret_file(tmp_path)
    flags = ("--tls-cert", cert, "--tls-key", key, "--tls-ca", cert, "--secret-file", secret)
    devices = [start(*flags).device, start(*flags).device]
    options = {"ctx_size": 128, "tls_ca": cert, "secret_file": secret}
    with gguf_pp.load(chat_model, devices, **options) as llm:
        assert llm.generate(PROMPT, max_tokens=8, temperature=0).completion().text == here
        first, second = llm._pipeline.remote_stages
        assert first._linked_to is second


def test_a_check_says_what_a_worker_has(plain, capsys):
    code, out, _ = run(capsys, "worker", "--check", plain.address)
    assert code == 0
    assert re.search(rf"{plain.address}: gguf-pp \d+\.\d+\.\d+, protocol 1\n", out)
    assert "no secret, not encrypted" in out
    assert re.search(r"round trip \d+\.\d\d ms", out)
    assert re.search(r"bandwidth \d+ MB/s there, \d+ MB/s back", out)
    assert "GiB" in out
    assert "model" not in out


def test_a_check_as_json(plain, capsys):
    code, out, _ = run(capsys, "rpc-server", "--check", plain.device, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["address"] == plain.address
    assert report["wire_versions"] == [1, 1]
    assert report["has_model"] is None
    assert 0 < report["round_trip_s"] < 5
    assert min(report["up_bytes_per_s"], report["down_bytes_per_s"]) > 1e6
    assert len(report["devices"]) == 1


def test_a_check_finds_a_model_where_it_is(start, capsys, tmp_path, chat_model):
    def has_model(worker):
        flags = ("--check", worker.address, "-m", chat_model)
        assert run(capsys, "worker", *flags)[0] == 0
        return json.loads(run(capsys, "worker", *flags, "--json")[1])["has_model"]

    (tmp_path / "models").mkdir()
    shutil.copy(chat_model, tmp_path / "models" / "another name.gguf")
    assert has_model(start("--model-dir", str(tmp_path / "models"))) == "model-dir"
    caching = start("--cache", str(tmp_path / "cache"), "--cache-size", "1GiB")
    assert has_model(caching) == "no"
    with gguf_pp.load(chat_model, [caching.device], ctx_size=64):
        pass
    assert has_model(caching) == "cache"


def test_a_check_of_nobody_is_one_line(capsys, start):
    worker = start()
    worker.kill()
    result = run(capsys, "worker", "--check", worker.address, "--timeout", "2")
    assert_refused(result, f"{worker.address} is unreachable")


@pytest.mark.parametrize("flags", [["-m", "x.gguf"], ["--json"], ["--tls-cert", "x"]])
def test_flags_that_mean_nothing_without_others_are_misuse(flags, capsys):
    code, out, err = run(capsys, "worker", "-p", "0", "--cache-size", "0", *flags)
    assert (code, out) == (2, "")
    assert "error: " in err


def test_a_worker_that_is_too_small_says_by_how_much(start, chat_model):
    worker = start("--memory", "100KiB")
    match = rf"tcp://{worker.address}/cpu .*MiB free"
    with pytest.raises(PlacementError, match=match):
        gguf_pp.load(chat_model, [worker.device], ctx_size=64)
    light = Light(worker.address)
    assert light.free_bytes() == 100 << 10
    light.close()


def test_a_worker_with_less_memory_gets_smaller_buffers(start, chat_model, here):
    worker = start("--memory", "600KiB")
    options = {"ctx_size": 128, "parallel": 2}
    with gguf_pp.load(chat_model, ["cpu", worker.device], **options) as llm:
        assert llm.n_copies == 1 or llm._pipeline.rung.ubatch_size < 512
        assert llm.generate(PROMPT, max_tokens=8, temperature=0).completion().text == here


def test_more_clients_than_may_be_are_told_so(start, chat_model, here):
    worker = start("--max-clients", "1")
    with gguf_pp.load(chat_model, [worker.device], ctx_size=128) as llm:
        with pytest.raises(RemoteError, match=f"{worker.address}.*serves 1 clients already"):
            gguf_pp.load(chat_model, [worker.device], ctx_size=128)
        assert llm.generate(PROMPT, max_tokens=8, temperature=0).completion().text == here
    for _ in range(3):  # each finds the place of the one before free
        with gguf_pp.load(chat_model, [worker.device], ctx_size=128) as llm:
            assert llm.generate(PROMPT, max_tokens=8, temperature=0).completion().text == here


def test_a_session_is_one_line_of_the_log(start, chat_model):
    worker = start()
    with gguf_pp.load(chat_model, ["cpu", worker.device], ctx_size=128) as llm:
        llm.generate([65] * 10, max_tokens=3).completion()
    line = worker.wait_for(r"info: (\S+): layers 2-3 of chat.gguf, (\d+) tokens, [\d.]+ s: (.+)")
    assert int(line[2]) == 12
    assert "closed the connection" in line[3]


def client(nurse, chat_model, worker, *flags):
    """`gguf-pp run` as a process of its own, which has begun to answer."""
    what = ("-m", chat_model, "--device", worker.device, "-p", PROMPT, "-no-cnv", "--temp", "0")
    process = nurse.run("run", *what, *flags)
    process.wait_for("....", "out")
    return process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_client_whose_worker_ends_says_so_in_one_line(number, nurse, start, chat_model):
    worker = start()
    process = client(nurse, chat_model, worker, "-c", "60000")
    worker.send(number)
    if number == signal.SIGTERM:  # it would wait for the answer
        eventually(lambda: not reachable(worker))
        worker.send(number)
    assert process.wait() == 1
    errors = [line for line in process.log().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, process.log()
    assert worker.address in errors[0]
    assert "Traceback" not in process.log()


def test_sigterm_lets_an_answer_end_and_takes_no_more_clients(nurse, start, chat_model):
    worker = start("--timeout", "60")
    process = client(nurse, chat_model, worker, "-c", "8192", "-n", "200")
    worker.send(signal.SIGTERM)
    eventually(lambda: not reachable(worker))
    assert (process.wait(), len(process.output())) == (0, 200)
    assert worker.wait() == 0


def reachable(worker):
    try:
        Light(worker.address).close()
    except RemoteError:
        return False
    return True


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_an_impatient_signal_ends_at_once(numbers, start, chat_model):
    worker = start("--timeout", "60")
    light = Light(worker.address)
    light.load(whole(chat_model))
    with gguf_pp.load(chat_model, ["cpu", worker.device], ctx_size=60000) as llm:
        generation = llm.generate(PROMPT, temperature=0)
        next(generation)
        worker.send(numbers[0])
        for number in numbers[1:]:
            eventually(lambda: not reachable(worker))  # two signals at once may be one
            worker.send(number)
        assert worker.wait() in (0, 130)
        with pytest.raises(RemoteError, match=worker.address):
            generation.completion()
    light.close()


def test_sigterm_with_idle_clients_ends_soon(start, chat_model):
    worker = start("--timeout", "60")
    with gguf_pp.load(chat_model, ["cpu", worker.device], ctx_size=128) as llm:
        llm.generate(PROMPT, max_tokens=4).completion()
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        eventually(lambda: llm._pipeline.failure is not None)
        with pytest.raises(RemoteError, match=f"{worker.address} is unreachable"):
            llm.generate(PROMPT, max_tokens=4).completion()
