"""What a person sees who gets something wrong, and how fast the command line answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer

from gguf_pp.cli.flags import EngineFlags, SamplingFlags, flatten
from gguf_pp.cli.main import COMMANDS, main
from gguf_pp.config import Options
from gguf_pp.fetch import KNOWN
from gguf_pp.sampling import SamplingParams

HEAVY = ("torch", "numpy", "tokenizers", "jinja2", "gguf")


def parse(*argv: str) -> EngineFlags:
    """What `argv` sets in EngineFlags."""
    seen: list[EngineFlags] = []
    app = typer.Typer()
    app.command()(flatten(_taker(seen)))
    command = typer.main.get_command(app)
    with command.make_context("test", list(argv)) as context:
        command.invoke(context)
    return seen[0]


def _taker(seen):
    def take(engine: EngineFlags, prompt: Annotated[str, typer.Option("-p")] = "") -> None:
        """Keep what came."""
        assert not prompt or prompt.startswith("-")
        seen.append(engine)

    return take


def test_llama_cpps_names_of_several_letters_are_whole_options():
    flags = parse("m.gguf", "-sm", "none", "-ts", "3,1", "-ub", "auto", "-mg", "1", "-ngl", "99")
    more = parse("-ctk", "f32", "-ctv", "f16", "-dev", "cpu:0,cpu:1")
    assert flags.model_name() == "m.gguf"
    options = flags.options()
    assert (options.split_mode, options.tensor_split, options.ubatch_size) == ("none", "3,1", None)
    assert (options.main_gpu, options.n_gpu_layers) == (1, "99")
    options = more.options()
    assert (options.cache_type_k, options.cache_type_v) == ("f32", "f16")
    assert options.device == "cpu:0,cpu:1"


def test_a_value_may_look_like_an_option():
    assert parse("-p", "-sm", "-ub", "7").options().split_mode == "layer"
    assert parse("-p", "-foo", "-mg", "-1", "-c", "-5").options().ctx_size == -5


def test_short_options_take_attached_values():
    flags = parse("-c512", "-ts=2/1", "-t2", "--n-copies", "3")
    assert flags.options().ctx_size == 512
    assert (flags.tensor_split, flags.threads, flags.n_copies) == ("2/1", "2", 3)


def test_defaults_of_the_flags_are_those_of_the_library():
    assert EngineFlags().options() == Options()
    assert SamplingParams(**SamplingFlags().options()) == SamplingParams()


def errors(capsys, *argv: str) -> tuple[int, list[str]]:
    """Exit code and lines on stderr; nothing is on stdout."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert out == ""
    return code, err.splitlines()


MISUSE = {
    "run m --bogus": ("No such option: --bogus", "gguf-pp run --help"),
    "--bogus": ("No such option: --bogus", "gguf-pp --help"),
    "-x": ("No such option: -x", "gguf-pp --help"),
    "bogus": ("No such command 'bogus'", "gguf-pp --help"),
    "run a b": ("unexpected extra argument", "gguf-pp run --help"),
    "run m -n x": ("'-n': ", "gguf-pp run --help"),
    "run m -n -2": ("greater than or equal to -1", "gguf-pp run --help"),
    "run m -ub x": ("'x' is neither a whole number nor auto", "gguf-pp run --help"),
    "run m -p": ("requires an argument", "gguf-pp run --help"),
    "run a -m b -p x": ("two models: 'a' and -m 'b'", None),
    "run -p x": ("no model", "known name"),
    "run m": ("no prompt", "-p TEXT or -f FILE"),
    "run m -p x -f y": ("-p and -f both give a prompt", None),
    "run m -p x -st -no-cnv": ("-st is a turn of a chat", None),
    "run m -p x -sys y": ("-sys is for a chat", "-st"),
    "run m -p x -no-cnv --chat-template y": ("--chat-template is for a chat", "-st"),
    "run m -cnv --json": ("--json is for one answer", "-st"),
    "run m -st --chat-template x --chat-template-file y": ("both give a template", None),
    "perplexity m": ("Missing option '--file' / '-f'", "gguf-pp perplexity --help"),
    "perplexity m -f t --logprobs 3": ("requires 2 arguments", "gguf-pp perplexity --help"),
    "perplexity m -f t --logprobs -1 x": ("cannot be negative", None),
    "perplexity m -f t --json --logprobs 1 -": ("both write to stdout", None),
}


@pytest.mark.parametrize("line", MISUSE)
def test_misuse_is_two_plain_lines_and_exit_code_2(capsys, line):
    words, hint = MISUSE[line]
    code, lines = errors(capsys, *line.split())
    assert code == 2
    assert lines[0].startswith("error: ")
    assert words in lines[0]
    if hint is None:
        assert len(lines) == 1
    else:
        assert len(lines) == 2
        assert lines[1].startswith(" hint: ")
        assert hint in lines[1]


# These end before the file is looked at.
BAD_VALUES = {
    "-dev cuda:x": "no device 'cuda:x'",
    "--edge-copy fast": "--edge-copy cannot be 'fast'",
    "-dev cpu,cpu:1": "cpu is all cores",
    "-dev cpu:0,cpu:1 -ts 0,0": "leaves no device",
    "-dev cpu:0,cpu:1 -ts nan,1": "finite",
    "-dev cpu:0,cpu:1 -ts 1,2,3": "3 shares for 2 devices",
    "-dev cpu:0,cpu:1 -ts a": "is not a list of numbers",
    "--layers 0,3": "--layers '0,3' is not a list of positive whole numbers",
    "-sm row": "--split-mode cannot be 'row'",
    "-sm none -mg 1": "-mg 1: there are 1 devices",
    "-ctk q4": "--cache-type-k cannot be 'q4'",
    "--n-copies 17": "--n-copies cannot be 17",
    "--run-ahead 3": "--run-ahead cannot be 3",
    "-ub 0": "--ubatch-size cannot be 0",
    "-ub 512 -b 8": "exceeds --batch-size",
    "--memory lots": "is not a size",
    "-ngl some": "-ngl 'some'",
    "-t 0": "--threads",
    "--kernels fast": "--kernels cannot be 'fast'",
    "--temp nan": "--temp cannot be nan",
    "--top-k -1": "--top-k cannot be -1",
    "--top-p 1.5": "--top-p cannot be 1.5",
    "--min-p -0.1": "--min-p cannot be -0.1",
    "--repeat-penalty 0": "--repeat-penalty cannot be 0",
    "--repeat-last-n -2": "--repeat-last-n cannot be -2",
    "--seed -2": "--seed cannot be -2",
}


@pytest.mark.parametrize("flags", BAD_VALUES)
def test_a_bad_value_is_told_before_anything_is_opened(capsys, flags):
    code, lines = errors(capsys, "run", "there-is-no-such-model", "-p", "x", *flags.split())
    assert code == 1
    assert lines[0].startswith("error: ")
    assert BAD_VALUES[flags] in lines[0]


def test_a_model_that_is_no_gguf_is_named(capsys, tmp_path):
    code, lines = errors(capsys, "run", str(tmp_path / "none.gguf"), "-p", "x")
    assert (code, lines) == (1, [f"error: {tmp_path / 'none.gguf'}: no such file"])
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html><html><body>Not found</body></html>")
    code, lines = errors(capsys, "run", str(page), "-p", "x")
    assert code == 1
    assert str(page) in lines[0]
    assert "HTML" in lines[0]


AFTER_OPENING = {
    "-p x -dev cpu:0,cpu:1 --layers 1,2": "--layers",
    "-p x --override-kv llama.block_count=int:many": "many",
    "-p x --override-kv nonsense": "nonsense",
    "-p x -dev cpu,cuda:9999": "device 'cuda:9999'",
}


@pytest.mark.parametrize("flags", AFTER_OPENING)
def test_what_contradicts_the_model_is_told(capsys, chat_model, flags):
    code, lines = errors(capsys, "run", chat_model, *flags.split())
    assert code == 1
    assert AFTER_OPENING[flags] in lines[0]


def test_an_empty_prompt_is_an_error(capsys, chat_model):
    assert main(["run", chat_model, "-p", "", "-c", "64"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: the prompt is empty" in err.splitlines()


def test_a_prompt_longer_than_the_context_names_both_lengths(capsys, chat_model):
    assert main(["run", chat_model, "-p", "x" * 64, "-c", "64"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: the prompt has 64 tokens, the context 64" in err.splitlines()


def test_a_prompt_that_is_not_utf8_is_an_error(capsys, tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9")
    code, lines = errors(capsys, "run", "m", "-f", str(path))
    assert (code, lines[0]) == (1, f"error: {path} is not UTF-8: byte 0xe9 at offset 3")
    code, lines = errors(capsys, "run", "m", "-f", str(tmp_path))
    assert (code, lines) == (1, [f"error: {tmp_path} cannot be read: Is a directory"])


def test_an_unknown_name_says_what_is_known(capsys):
    code, lines = errors(capsys, "pull", "smollm")
    assert code == 1
    assert all(name in lines[1] for name in KNOWN)


def test_pull_without_a_name_lists_what_is_known(capsys, tmp_path):
    (tmp_path / KNOWN["smollm2-135m"].cached_name).write_bytes(b"too short")
    assert main(["pull", "--cache-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(KNOWN)
    assert all(line.endswith("not downloaded") for line in lines)
    assert main(["pull", "--json", "--cache-dir", str(tmp_path)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(m["name"], m["path"]) for m in listed] == [(name, None) for name in sorted(KNOWN)]


def test_a_model_that_is_there_is_not_downloaded_again(capsys, tmp_path):
    path = tmp_path / KNOWN["smollm2-135m"].cached_name
    with path.open("wb") as file:
        file.truncate(KNOWN["smollm2-135m"].n_bytes)
    assert main(["pull", "smollm2-135m", "--cache-dir", str(tmp_path)]) == 0
    assert capsys.readouterr() == (f"{path}\n", "")


def test_help_names_every_command_and_is_not_an_error(capsys):
    for argv in (["--help"], ["-h"], []):
        assert main(argv) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert all(f" {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    assert main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert f"gguf-pp {name} [OPTIONS]" in out
    assert err == ""


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "gguf-pp 0.1.0\n"


@pytest.mark.parametrize("line", ["--help", "run --help", "run m --bogus", "run m -p x -ts nan"])
def test_nothing_heavy_is_imported_before_it_is_needed(line):
    allowed = ["numpy"] if "-ts" in line else []  # the sampling flags are checked first
    assert imported(HEAVY, *line.split())[1] == allowed


def imported(names: tuple[str, ...], *argv: str) -> tuple[int, list[str]]:
    """Exit code of a command in a process of its own, and which of `names` it imported."""
    script = (
        "import sys\n"
        "from gguf_pp.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        f"print(code, *(m for m in {names!r} if m in sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *argv], capture_output=True, text=True, check=True
    )
    code, *found = done.stderr.splitlines()[-1].split()
    return int(code), found


def test_what_is_wrong_with_a_file_is_told_before_torch_is_imported(tmp_path, chat_model):
    (tmp_path / "m.gguf").write_bytes(b"no GGUF at all")
    wrong_vocabulary = ("--override-kv", "tokenizer.ggml.model=str:rwkv")
    for argv in (["run", str(tmp_path / "m.gguf")], ["run", str(chat_model), *wrong_vocabulary]):
        assert imported(("torch",), *argv, "-p", "x") == (1, [])


def test_a_run_imports_nothing_for_what_it_does_not_do(chat_model):
    unused = ("jinja2", "rich.progress", "rich.table", "gguf_pp.trace_file")
    argv = ("run", str(chat_model), "-p", "Hello", "-n", "1", "-c", "64", "-no-cnv")
    assert imported(("torch", *unused), *argv) == (0, ["torch"])


def test_the_module_runs_like_the_script():
    done = subprocess.run(
        [sys.executable, "-m", "gguf_pp", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "gguf-pp 0.1.0\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-m", "gguf_pp", "pull"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_under_the_output_is_told_in_one_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gguf_pp", "pull"],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.stderr == "error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_a_command_is_a_module_of_its_name():
    folder = Path(sys.modules["gguf_pp.cli.main"].__file__ or "").parent
    assert all((folder / f"{name}.py").is_file() for name in COMMANDS)
