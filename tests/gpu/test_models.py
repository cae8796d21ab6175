"""Sections of the script for a GPU that run whole models, on the CPU."""

import os
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from gguf import GGUFReader

from tests.gpu import check, models, nursery, syncs
from tests.gpu.cut import cut
from tests.gpu.harness import Missing
from tests.gpu.heard import Heard
from tests.real import real

SIZE = nursery.Size(n_layers=4, n_heads=2, n_kv_heads=1, n_ff=128, n_vocab=320)


@pytest.fixture
def on_cpu(monkeypatch):
    """The sections of models with CPU devices in place of CUDA's, and a small model."""
    monkeypatch.setattr(models, "ONE", ["cpu:0"])
    monkeypatch.setattr(models, "TWO", ["cpu:0", "cpu:1"])
    monkeypatch.setattr(models, "MIXED", ["cpu:0", "cpu:1"])
    monkeypatch.setattr(models, "CAP", "{}")
    monkeypatch.setattr(models, "N_TOKENS", 8)
    monkeypatch.setattr(models, "N_STREAMS", 3)
    monkeypatch.setattr(models, "write_model", partial(nursery.write_model, size=SIZE))


def test_end_to_end_goes_through_on_the_cpu(on_cpu):
    (section,) = (section for section in check.SECTIONS if section.name == "end_to_end")
    figures = {}
    for part in section.parts:
        heard = Heard()
        models.check_end_to_end(part, heard.report)
        assert heard.faults == []
        figures[part] = heard.figures
    for way in check.WAYS:
        assert (figures[way]["ids_equal"], figures[way]["of"]) == (8, 8)
    assert figures["exact"]["logits_off"] == 0
    assert figures["cap"]["context_capped"] < figures["cap"]["context"] == 4096


def test_tokens_per_second_are_told_for_each_number_of_stages_and_groups(on_cpu):
    heard = Heard()
    models.check_rates("", heard.report)
    assert heard.faults == []
    assert len(heard.figures["tokens_per_s"]) == 5
    assert all(rate > 0 for rate in heard.figures["tokens_per_s"].values())


def test_other_ids_than_the_cpu_gives_are_a_fault(on_cpu, monkeypatch):
    real, calls = models.answer, []

    def answer(llm, seed=0):
        calls.append(real(llm, seed))
        return calls[-1] if len(calls) != 2 else [*calls[-1][:5], -1, *calls[-1][6:]]

    monkeypatch.setattr(models, "answer", answer)
    heard = Heard()
    models.check_end_to_end("exact", heard.report)
    assert heard.faults == ["ids differ from token 5 on"]


def test_steps_of_which_nothing_was_captured_are_a_fault(on_cpu, monkeypatch):
    monkeypatch.setattr(models.cuda_trials, "graph_replays", lambda torch, index: True)
    heard = Heard()
    models.check_graphs("", heard.report)
    assert len(heard.faults) == 4
    assert all("nothing was captured" in fault for fault in heard.faults)
    assert heard.figures["1 stages, 1 sequences, ubatch 64"]["eager"]["tokens_per_s"] > 0


def test_a_worker_lends_what_it_can(on_cpu):
    heard = Heard()
    models.check_remote("", heard.report)
    assert heard.faults == []
    assert all(heard.figures[name]["answer_s"] > 0 for name in models._with_worker("x"))
    assert len(heard.figures["free_mib"]) == 2


@pytest.mark.parametrize("what", ["ids", "logits"])
def test_other_results_than_without_a_worker_are_a_fault(what, on_cpu, monkeypatch):
    real, calls = models.outcome, []

    def outcome(llm):
        ids, logits = real(llm)
        calls.append(llm)
        if len(calls) == 3:
            return ([*ids[:-1], -1], logits) if what == "ids" else (ids, logits + 1e-7)
        return ids, logits

    monkeypatch.setattr(models, "outcome", outcome)
    heard = Heard()
    models.check_remote("", heard.report)
    assert heard.faults == [f"in the middle: {what} are not those without a worker"]


def test_a_worker_that_cannot_lend_says_why(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit(f'{sys.argv}: no such device')")
    monkeypatch.setattr(models, "CHECK", script)
    with pytest.raises(Missing, match=r"gpu:7.*no such device"), models.worker("cache", "gpu:7"):
        pass


def test_a_worker_that_computes_with_something_else_is_no_proof(on_cpu, monkeypatch):
    monkeypatch.setattr(models, "worker", lambda *what: nullcontext("localhost:1"))
    monkeypatch.setattr(models, "load", lambda *what: nullcontext(None))
    monkeypatch.setattr(models, "outcome", lambda llm: ([], []))
    monkeypatch.setattr(models, "kernels_of", lambda llm: ["triton", "abacus"])
    with pytest.raises(Missing, match="abacus"):
        models.check_remote("", Heard().report)


def test_a_model_may_be_named(on_cpu, tmp_path):
    path = nursery.write_model(tmp_path / "own.gguf", SIZE)
    with models.model_of(Heard(model=str(path)).report) as found:
        assert found == path


def test_the_made_model_answers_in_many_words(on_cpu, tmp_path):
    path = nursery.write_model(tmp_path / "own.gguf", SIZE)
    with models.load(path, ["cpu"]) as llm:
        assert len(set(models.answer(llm))) > 3


def test_syncs_are_counted_by_line(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def work():
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    (site,) = syncs.syncs_of(work).items()
    assert site[0].startswith(f"gpu{os.sep}test_models.py:")
    assert site[1] == 3
    assert modes == ["warn", "default"]


def test_steps_of_every_way_to_choose_are_watched(on_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    chosen = []
    real = models.LLM.generate

    def generate(llm, prompt, **how):
        chosen.append(how)
        return real(llm, prompt, **how)

    monkeypatch.setattr(models.LLM, "generate", generate)
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.full(size, 1.0))
    waits = [{"here": 1}, *[{}] * 5, {"there": 2}]
    monkeypatch.setattr(syncs, "syncs_of", lambda work: (work(), waits.pop(0))[1])
    heard = Heard()
    syncs.check("", heard.report)
    assert heard.faults == ["of all: 2 syncs in 4 steps of 2 stages"]
    assert set(heard.figures) == {"1 stages", "2 stages"}
    assert {how.get("top_k") for how in chosen} == {None, 40, 0}


# A real model.


def test_the_first_layers_of_a_real_model_answer_as_on_the_cpu(on_cpu):
    real("smollm2-135m")
    heard = Heard()
    models.check_real("exact", heard.report)
    assert heard.faults == []
    assert heard.figures == {"ids_equal": 8, "of": 8, "logits_off": 0.0}


def test_a_model_that_is_cut_keeps_all_but_its_later_layers(tmp_path):
    path = nursery.write_model(tmp_path / "own.gguf", SIZE)
    whole, less = GGUFReader(path), GGUFReader(cut(path, 2, tmp_path / "cut.gguf"))
    changed = {
        name: field.contents()
        for name, field in less.fields.items()
        if field.contents() != whole.fields[name].contents()
    }
    assert changed.pop("llama.block_count") == 2
    assert set(changed) <= {"GGUF.tensor_count", "GGUF.kv_count"}
    kept = {t.name: t for t in less.tensors}
    for t in whole.tensors:
        is_kept = not t.name.startswith(("blk.2.", "blk.3."))
        assert (t.name in kept) is is_kept
        if is_kept:
            assert kept[t.name].tensor_type == t.tensor_type
            assert kept[t.name].data.tobytes() == t.data.tobytes()


def test_without_a_real_model_it_is_said_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("GGUF_PP_CACHE", str(tmp_path))
    with pytest.raises(Missing, match="gguf-pp pull smollm2-135m"):
        models.check_real("exact", Heard().report)
