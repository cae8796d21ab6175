"""`gguf-pp inspect`: any GGUF file is shown, and nothing in it can steer the terminal."""

import json
import subprocess
import sys

import pytest

from gguf_pp.cli.inspect import N_CHARS, N_ITEMS
from gguf_pp.cli.main import main
from gguf_pp.cli.tables import printable
from tests.conftest import TEMPLATE
from tests.gguf_bytes import ARRAY, F32, I32, STRING, U16, U32, gguf, key, tensor
from tests.tiny import NAMES, SPECS, write_tiny
from tests.vocabs import SHARED

ARCHITECTURE = "general.architecture"
HOSTILE = "\x1b[2J\x1b]0;owned\x07 [bold red]x[/] :smile: \u202egnp\u202c \x9b1m \r\n\t\x00"
ESCAPED = r"\x1b[2J\x1b]0;owned\x07 [bold red]x[/] :smile: \u202egnp\u202c \x9b1m \r\n\t\x00"


def inspect(capsys, path, *argv):
    code = main(["inspect", str(path), *argv])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def as_json(capsys, path, *argv):
    return json.loads(inspect(capsys, path, "--json", *argv))


@pytest.fixture
def write(tmp_path):
    def write(*keys, tensors=(), data=b""):
        path = tmp_path / "file.gguf"
        path.write_bytes(gguf(keys, tensors, data))
        return path

    return write


def test_a_model_is_summed_up(capsys, chat_model):
    lines = inspect(capsys, chat_model).splitlines()
    assert lines[:3] == [
        f"file          {chat_model}",
        "architecture  llama",
        "supported     yes",
    ]
    assert lines[3] == "parameters    47,776 in 39 tensors"
    assert lines[4] == "size          186.6 KiB, 32.00 bits per weight"
    metadata = lines[lines.index("metadata") + 1 : lines.index("tensors") - 1]
    values = dict(line.split(maxsplit=1) for line in metadata)
    assert values["llama.context_length"] == "65536"
    assert values["llama.attention.layer_norm_rms_epsilon"] == "1e-05"
    assert values["tokenizer.ggml.tokens"].endswith(", ... (262 items)]")
    end = lines[lines.index("tokenizer") :]
    assert "eos                260 <|end|>" in end
    assert "end of generation  260 <|end|>" in end


def test_layers_that_are_alike_are_shown_once_and_all_with_all(capsys, chat_model):
    lines = inspect(capsys, chat_model).splitlines()
    at = lines.index(next(line for line in lines if line.startswith("blk.0-3")))
    assert " ".join(lines[at + 2].split()) == "attn_q.weight F32 32 x 32 4 x 4.0 KiB"
    assert sum(line.startswith("blk.") for line in lines) == 1
    lines = inspect(capsys, chat_model, "--all").splitlines()
    assert [line.rstrip() for line in lines if line.startswith("blk.")] == [
        f"blk.{i}" for i in range(4)
    ]
    assert sum(line.startswith("  attn_q.weight") for line in lines) == 4


def test_layers_that_differ_stand_apart(capsys, write):
    names = [f"blk.{i}.w" for i in (0, 1, 2, 3, 5)]
    sizes = (8, 4, 8, 8, 8)
    entries = [
        tensor(name, [n], offset=32 * i)
        for i, (name, n) in enumerate(zip(names, sizes, strict=True))
    ]
    path = write(key(ARCHITECTURE, STRING, "llama"), tensors=entries, data=bytes(160))
    lines = [line.rstrip() for line in inspect(capsys, path).splitlines()]
    assert [line for line in lines if line.startswith("blk.")] == ["blk.0,2-3,5", "blk.1"]


def test_json_has_the_documented_keys(capsys, chat_model):
    got = as_json(capsys, chat_model)
    assert " ".join(got) == (
        "path architecture unsupported n_bytes n_parameters bits_per_weight shards metadata types "
        "tensors tokenizer"
    )
    assert got["types"] == [{"type": "F32", "n_tensors": 39, "n_bytes": got["n_bytes"]}]
    assert got["tensors"][0] == {
        "name": "token_embd.weight",
        "type": "F32",
        "shape": [262, 32],
        "n_bytes": 262 * 32 * 4,
    }
    assert got["tokenizer"] == {
        "model": "gpt2",
        "pre": "gpt-2",
        "n_vocab": 262,
        "special": {"bos": 261, "eos": 260},
        "end_of_generation": [260],
        "unsupported": None,
    }


def test_json_shortens_arrays_unless_all_is_asked_for(capsys, chat_model):
    tokens = as_json(capsys, chat_model)["metadata"]["tokenizer.ggml.tokens"]
    whole = as_json(capsys, chat_model, "--all")["metadata"]["tokenizer.ggml.tokens"]
    assert tokens == {"n_items": 262, "first": whole[:N_ITEMS]}
    assert len(whole) == 262


def test_json_has_no_nan(capsys, write):
    inf = float("inf")
    path = write(key("a", F32, inf), key("b", ARRAY, (F32, [1.0, float("nan")])))
    assert as_json(capsys, path)["metadata"] == {"a": "inf", "b": [1.0, "nan"]}


def test_long_texts_are_shortened_unless_all_is_asked_for(capsys, write):
    path = write(key("a", STRING, "x" * 300))
    assert f"a  {'x' * N_CHARS} ... (300 characters)" in inspect(capsys, path).splitlines()
    assert f"a  {'x' * 300}" in inspect(capsys, path, "--all").splitlines()


def test_arrays_of_arrays_are_shown(capsys, write):
    path = write(key("a", ARRAY, (ARRAY, [(I32, [1, 2]), (I32, range(9))])))
    assert "a  [[1, 2], [0, 1, 2, 3, 4, 5, ... (9 items)]]" in inspect(capsys, path)


def test_the_template_is_printed_and_nothing_else(capsys, chat_model, plain_model):
    assert inspect(capsys, chat_model, "--template") == TEMPLATE + "\n"
    assert main(["inspect", plain_model, "--template"]) == 1
    assert capsys.readouterr() == ("", "error: the file has no chat template\n")


def test_of_several_templates_each_is_named(capsys, write):
    name = "tokenizer.chat_template"
    path = write(key(f"{name}.tool", STRING, "B"), key(name, STRING, "A"))
    out = inspect(capsys, path, "--template")
    assert out.splitlines() == [f"{{# {name} #}}", "A", f"{{# {name}.tool #}}", "B"]


@pytest.mark.parametrize("flags", [(), ("--all",), ("--json",), ("--template",)])
def test_nothing_in_a_file_reaches_the_terminal_raw(capsys, write, flags):
    path = write(
        key(ARCHITECTURE, STRING, HOSTILE),
        key(f"key {HOSTILE}", STRING, HOSTILE),
        key("tokenizer.chat_template", STRING, HOSTILE),
        key("tokenizer.ggml.model", STRING, HOSTILE),
        key("tokenizer.ggml.tokens", ARRAY, (STRING, [HOSTILE])),
        key("tokenizer.ggml.bos_token_id", U32, 0),
        tensors=[tensor("blk.0." + HOSTILE[:20], [1]), tensor(HOSTILE[:20], [1], offset=32)],
        data=bytes(64),
    )
    out = inspect(capsys, path, *flags)
    assert all(char.isprintable() or char in "\n\t" for char in out)
    if "--json" in flags:
        assert json.loads(out)["metadata"][f"key {HOSTILE}"] == HOSTILE
    elif "--template" in flags:
        assert out == ESCAPED.replace(r"\n\t", "\n\t") + "\n"
    else:
        assert out.count(ESCAPED) >= 6
        assert "\t" not in out


def test_what_is_printable_stays(capsys):
    assert printable("naïve ▁<|eot|> 日本 😀 [b]") == "naïve ▁<|eot|> 日本 😀 [b]"
    assert printable("a\nb\tc", lines=True) == "a\nb\tc"
    assert printable("\u2028\U000e0001\ud800") == r"\u2028\U000e0001\ud800"


UNRUNNABLE = {
    "unknown": ([key(ARCHITECTURE, STRING, "mamba")], "the architecture is not among gemma, "),
    "nameless": ([], "'general.architecture' is missing"),
    "mistyped": ([key(ARCHITECTURE, U32, 7)], "should be str, but is int"),
    "adapter": (
        [key(ARCHITECTURE, STRING, "llama"), key("general.type", STRING, "adapter")],
        "the file is an adapter, not a model",
    ),
}


@pytest.mark.parametrize("kind", UNRUNNABLE)
def test_a_file_that_cannot_be_run_is_shown_and_why(capsys, write, kind):
    keys, why = UNRUNNABLE[kind]
    path = write(*keys, tensors=[tensor("t", [1])], data=bytes(4))
    out = inspect(capsys, path)
    line = next(line for line in out.splitlines() if line.startswith("supported"))
    assert line.startswith("supported     no: ")
    assert why in line
    assert why in as_json(capsys, path)["unsupported"]


def test_a_vocabulary_of_an_unsupported_kind_is_shown(capsys, write):
    path = write(
        key(ARCHITECTURE, STRING, "llama"),
        key("tokenizer.ggml.model", STRING, "t5"),
        key("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "b"])),
        key("tokenizer.ggml.eos_token_id", U32, 7),
    )
    out = inspect(capsys, path)
    assert "supported     no: the file has a vocabulary only, no tensors" in out
    assert "not usable         tokenizer 't5' is not supported" in out
    assert "eos                7" in out.splitlines()
    got = as_json(capsys, path)
    assert (got["n_parameters"], got["bits_per_weight"], got["tensors"]) == (0, None, [])


def test_shards_are_listed(capsys, tmp_path):
    for i in range(2):
        keys = [key("split.no", U16, i), key("split.count", U16, 2)]
        keys += [key("split.tensors.count", I32, 2)]
        data = gguf(keys, [tensor(f"t{i}", [4])], bytes(16))
        (tmp_path / f"m-0000{i + 1}-of-00002.gguf").write_bytes(data)
    path = tmp_path / "m-00002-of-00002.gguf"
    lines = inspect(capsys, path).splitlines()
    assert "shard 1       m-00001-of-00002.gguf: 1 tensor, 16 B" in lines
    assert [s["n_bytes"] for s in as_json(capsys, path)["shards"]] == [16, 16]


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_we_have_is_supported(capsys, tmp_path, name):
    got = as_json(capsys, write_tiny(name, tmp_path / "m.gguf"))
    assert got["unsupported"] is None
    assert len(got["tensors"]) == len(SPECS[name]["tensors"])


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared vocabularies are not here")
def test_every_shared_vocabulary_is_shown(capsys):
    paths = sorted(SHARED.glob("*.gguf"))
    assert paths
    for path in paths:
        got = as_json(capsys, path)
        assert "a vocabulary only" in got["unsupported"]
        assert got["tokenizer"]["n_vocab"] > 1000


def test_torch_is_not_loaded(chat_model):
    code = (
        "import sys; from gguf_pp.cli.main import main\n"
        f"assert main(['inspect', {chat_model!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
