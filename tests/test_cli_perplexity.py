"""`gguf-pp perplexity`: windows, what is scored, what is written."""

import json
import math

import numpy as np
import pytest

import gguf_pp
from gguf_pp.cli.main import main
from gguf_pp.cli.perplexity import cut_windows, written
from gguf_pp.errors import ConfigError

TEXT = "It was a dark and stormy night; the rain fell in torrents."
N_TOKENS = len(TEXT) - TEXT.count("th")  # the vocabulary's only merge


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def measure(capsys, *argv: str) -> dict:
    assert main(["perplexity", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_windows_without_bos_do_not_score_their_first_token():
    windows = cut_windows([10, 11, 12, 13, 14], [], 2)
    assert [(w.ids, w.first) for w in windows] == [([10, 11], 1), ([12, 13], 3)]


def test_windows_with_bos_score_every_token():
    windows = cut_windows([10, 11, 12, 13, 14], [1], 3)
    assert [(w.ids, w.first) for w in windows] == [
        ([1, 10, 11], 0),
        ([1, 12, 13], 2),
        ([1, 14], 4),
    ]


def test_windows_too_small_to_predict_are_refused():
    for bos, ctx_size in (([], 1), ([1], 1)):
        with pytest.raises(ConfigError, match="a context of 1 predicts nothing"):
            cut_windows([1, 2], bos, ctx_size)


def expected(model: str, ids: list[int], n_scored: int) -> np.ndarray:
    """Log-probabilities in float64 from the logits of one window."""
    with gguf_pp.load(model, ctx_size=512) as llm:
        logits = llm.logits(ids).astype(np.float64)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logits[np.arange(len(ids) - 1), ids[1:]][-n_scored:]


def test_the_mean_is_over_every_token_but_the_first_of_the_window(capsys, chat_model, text):
    got = measure(capsys, chat_model, "-f", text)
    with gguf_pp.load(chat_model, ctx_size=64) as llm:
        ids = llm.tokenize(TEXT)
    values = expected(chat_model, ids, len(ids) - 1)
    assert (got["tokens"], got["windows"], got["ctx_size"]) == (len(ids) - 1, 1, 512)
    assert got["nll"] == pytest.approx(-values.mean(), abs=1e-4)
    assert got["perplexity"] == pytest.approx(math.exp(got["nll"]))
    assert got["seconds"] > 0
    assert got["pipeline"]["enabled"] is False


def test_logprobs_are_lines_by_the_position_of_the_token_that_follows(
    capsys, plain_model, text, tmp_path
):
    out = tmp_path / "lines.jsonl"
    got = measure(capsys, plain_model, "-f", text, "-c", "20", "--logprobs", "3", str(out))
    with gguf_pp.load(plain_model, ctx_size=64) as llm:
        bos, *ids = llm.tokenize(TEXT)
    lines = lines_of(out)
    assert [line["position"] for line in lines] == list(range(len(ids)))
    assert [line["id"] for line in lines] == ids
    assert (got["tokens"], got["windows"]) == (len(ids), -(-len(ids) // 19))
    second = expected(plain_model, [bos, *ids[19:38]], 19)
    assert [line["logprob"] for line in lines[19:38]] == pytest.approx(second, abs=1e-4)
    for line in lines:
        best = [value for _, value in line["top"]]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert line["logprob"] <= best[0]
        of_id = dict(line["top"]).get(line["id"])
        assert of_id is None or of_id == line["logprob"]
    assert got["nll"] == pytest.approx(-np.mean([line["logprob"] for line in lines]), abs=1e-5)


def test_a_split_writes_the_same_lines(capsys, chat_model, text, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    flags = ("-f", text, "-c", "32", "-ub", "8", "--exact")
    measure(capsys, chat_model, *flags, "--logprobs", "2", str(one))
    got = measure(capsys, chat_model, *flags, "-dev", "cpu:0,cpu:1", "--logprobs", "2", str(two))
    assert got["pipeline"]["enabled"] is True
    assert one.read_text() == two.read_text()


def test_lines_may_go_to_stdout(capsys, chat_model, text):
    assert main(["perplexity", chat_model, "-f", text, "--logprobs", "0", "-"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["top"] for line in lines] == [[]] * (N_TOKENS - 1)
    assert last.startswith("nll ")


def test_a_text_too_short_is_an_error(capsys, chat_model, tmp_path):
    path = tmp_path / "short"
    path.write_text("x")
    assert main(["perplexity", chat_model, "-f", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: the text has 1 tokens, too few to predict one from another" in err.splitlines()


def test_more_best_tokens_than_there_are_is_an_error(capsys, chat_model, text, tmp_path):
    out = tmp_path / "lines"
    assert main(["perplexity", chat_model, "-f", text, "--logprobs", "263", str(out)]) == 1
    err = capsys.readouterr().err
    assert "error: --logprobs 263: the vocabulary has 262 tokens" in err.splitlines()
    assert not out.exists()


def test_a_failure_leaves_the_old_file(tmp_path):
    path = tmp_path / "lines"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), written(path) as out:
        assert out is not None
        out.write("new")
        out.flush()
        assert path.read_text() == "old"
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with written(path) as out:
        assert out is not None
        out.write("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(capsys, chat_model, text, tmp_path):
    out = tmp_path / "none" / "lines"
    assert main(["perplexity", chat_model, "-f", text, "--logprobs", "1", str(out)]) == 1
    err = capsys.readouterr().err
    assert "cannot be written: No such file or directory" in err
