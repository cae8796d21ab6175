import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp.errors import FormatError
from gguf_pp.gguf import Identity, ModelFile, TensorSource, identity_of
from gguf_pp.wire import ProtocolError
from gguf_pp.worker.store import Receiver, Store
from tests.manifests import LARGE, assert_same, declared, open_in, scalars, send, write_model
from tests.test_gguf_shards import shard
from tests.tiny import write_tiny


@pytest.fixture
def file(tmp_path):
    with ModelFile.open(write_tiny("llama", tmp_path / "model.gguf")) as file:
        yield file


@pytest.fixture
def cache_dir(tmp_path):
    return tmp_path / "cache"


def test_the_first_session_is_sent_everything_and_the_next_nothing(file, cache_dir):
    store = Store([], cache_dir, LARGE)
    assert store.where(identity_of(file)) is None
    with open_in(store, file) as stored:
        assert stored.origin == "client"
        assert stored.missing == tuple(range(len(file.tensors)))
        assert stored.missing_bytes == file.n_bytes
        send(stored, file)
        stored.finish()
        assert_same(stored, file)
    assert store.where(identity_of(file)) == "cache"
    for again in (store, Store([], cache_dir, LARGE)):
        with open_in(again, file) as stored:
            assert (stored.origin, stored.missing, stored.missing_bytes) == ("cache", (), 0)
            stored.finish()
            assert_same(stored, file)


def test_a_session_is_sent_what_others_did_not_bring(file, cache_dir):
    store = Store([], cache_dir, LARGE)
    tensors, identity = declared(file), identity_of(file)
    half = len(tensors) // 2
    with store.open(identity, {}, tensors[:half]) as stored:
        send(stored, file)
    with store.open(identity, {}, tensors[::-1]) as stored:
        assert stored.origin == "client"
        assert stored.missing == tuple(range(len(tensors) - half))


def test_a_copy_of_our_own_is_used_and_needs_nothing(file, cache_dir, tmp_path):
    store = Store([tmp_path], cache_dir, LARGE)
    assert store.where(identity_of(file)) == "model-dir"
    with open_in(store, file) as stored:
        assert (stored.origin, stored.missing) == ("model-dir", ())
        stored.finish()
        assert_same(stored, file)
        for name in stored.tensors:
            stored.forget(name)
        assert_same(stored, file)
        with pytest.raises(ProtocolError, match="none is missing"):
            stored.write(0, 0, b"x")


def test_a_copy_in_shards_is_used(tmp_path, cache_dir):
    for i in range(3):
        (tmp_path / f"model-{i + 1:05}-of-00003.gguf").write_bytes(shard(i))
    with ModelFile.open(tmp_path / "model-00001-of-00003.gguf") as file:
        with open_in(Store([tmp_path], None, 0), file) as stored:
            assert stored.origin == "model-dir"
            assert_same(stored, file)
        with open_in(Store([], cache_dir, LARGE), file) as stored:
            send(stored, file)
            assert_same(stored, file)


def test_tensors_that_our_copy_does_not_have_are_refused(file, tmp_path):
    store = Store([tmp_path], None, 0)
    for wrong in (["other", 0, [4], 16], ["output_norm.weight", 0, [4], 16]):
        with pytest.raises(ProtocolError, match="not in the model as it was declared"):
            store.open(identity_of(file), {}, [wrong])


def test_a_stored_model_is_a_tensor_source_that_names_no_path(file, cache_dir, tmp_path):
    def missing_in(source: TensorSource) -> str:
        with pytest.raises(FormatError) as caught:
            source.require("nothing", (1,))
        return str(caught.value)

    for folders in ([], [tmp_path]):
        with open_in(Store(folders, cache_dir, LARGE), file) as stored:
            assert stored.require("output_norm.weight", (64,)).n_bytes == 4 * 64
            assert str(tmp_path) not in missing_in(stored)
            assert stored.metadata.str_of("general.architecture") == "llama"


def test_metadata_is_the_clients(file, tmp_path):
    values = {**scalars(file), "llama.rope.freq_base": 5.0}
    with Store([tmp_path], None, 0).open(identity_of(file), values, declared(file)) as stored:
        assert stored.metadata.float_of("llama.rope.freq_base") == 5.0


@pytest.mark.parametrize("limit", [0, 1000])
def test_without_room_in_the_cache_weights_are_kept_for_the_session(limit, file, cache_dir):
    store = Store([], cache_dir, limit)
    with open_in(store, file) as stored:
        assert stored.origin == "client"
        send(stored, file)
        stored.finish()
        assert_same(stored, file)
        kept = stored.data("output_norm.weight")
        assert list(cache_dir.iterdir()) == []
    assert kept.tobytes() == file.data("output_norm.weight").tobytes()
    assert store.usage() == (0, 0)
    with open_in(store, file) as stored:
        assert len(stored.missing) == len(file.tensors)


def test_no_cache_needs_no_folder(file):
    store = Store([], None, LARGE)
    with open_in(store, file) as stored:
        send(stored, file)
        assert_same(stored, file)


def test_names_never_become_paths(tmp_path, cache_dir):
    names = ["../../../escape", "/etc/passwd", "nul\0nul", "lock", "tmp-1", ".", "n" * 1000, "a b"]
    path = write_model(tmp_path / "model.gguf", dict.fromkeys(names, 4))
    with ModelFile.open(path) as file, open_in(Store([], cache_dir, LARGE), file) as stored:
        send(stored, file)
        assert_same(stored, file)
        home = cache_dir / identity_of(file).digest[:2] / identity_of(file).digest
        files = {p for p in tmp_path.rglob("*") if p.is_file()} - {path}
        assert len(files) == len(names) + 1
        assert {p.parent for p in files} == {home}


def test_tensors_that_differ_in_name_type_or_shape_are_others(tmp_path, cache_dir):
    identity = Identity((1 << 20,), "a" * 64)
    store = Store([], cache_dir, LARGE)
    with store.open(identity, {}, [["t", 0, [2, 8], 64]]) as stored:
        stored.write(0, 0, bytes(64))
    for other in (["t2", 0, [2, 8], 64], ["t", 26, [2, 8], 64], ["t", 0, [16], 64]):
        with store.open(identity, {}, [other]) as stored:
            assert stored.missing == (0,)


class Shelf:
    """Keeps what is written in memory."""

    def __init__(self):
        self.log = []

    def prepare(self, infos):
        self.log.append(("prepare", len(infos)))

    def begin(self, info):
        self.log.append(("begin", info.name))

    def append(self, data):
        self.log.append(("append", len(data)))

    def commit(self):
        self.log.append("commit")


@given(st.data())
def test_only_the_next_piece_is_taken(data):
    """Any pieces, with right ones among them: a model of two numbers says which are taken."""
    tensors = [[f"t{i}", 24, [n], n] for i, n in enumerate((5, 1, 30, 8))]
    with_infos = Store([], None, 0).open(Identity((100,), "0" * 64), {}, tensors)
    infos = list(with_infos.tensors.values())
    missing = data.draw(st.lists(st.integers(0, 3), unique=True))
    shelf = Shelf()
    receiver = Receiver(shelf, infos, missing)
    left, current, n_written = set(missing), None, 0
    for _ in range(data.draw(st.integers(0, 25))):
        # Mostly the next piece, or pieces would hardly ever fit.
        i, offset = current if current is not None else min(left, default=0), n_written
        wrong = data.draw(st.sampled_from(["", "", "", "tensor", "offset"]))
        i = data.draw(st.integers(-1, 4)) if wrong == "tensor" else i
        offset = data.draw(st.integers(-1, 31)) if wrong == "offset" else offset
        n = data.draw(st.integers(0, 31))
        fits = i in left and current in (None, i) and offset == n_written
        if not (fits and 0 < n <= infos[i].n_bytes - offset):
            before = list(shelf.log)
            with pytest.raises(ProtocolError):
                receiver.write(i, offset, memoryview(bytes(n)))
            assert shelf.log == before
            continue
        receiver.write(i, offset, memoryview(bytes(n)))
        current, n_written = i, n_written + n
        if n_written == infos[i].n_bytes:
            left.remove(i)
            current, n_written = None, 0
    if left:
        with pytest.raises(ProtocolError, match=f"{len(left)} tensors"):
            receiver.finish()
    else:
        receiver.finish()
    assert shelf.log.count("commit") == len(missing) - len(left)
    assert [entry for entry in shelf.log if entry[0] == "prepare"] == shelf.log[:1]


@given(st.integers(1, 70), st.booleans())
def test_pieces_of_any_size_make_the_same_tensors(tmp_path_factory, chunk, cached):
    folder = tmp_path_factory.mktemp("pieces")
    path = write_model(folder / "model.gguf", {"a": 7, "b": 1, "c": 40})
    store = Store([], folder / "cache", LARGE if cached else 0)
    with ModelFile.open(path) as file, open_in(store, file) as stored:
        send(stored, file, chunk=chunk)
        stored.finish()
        assert_same(stored, file)
    shutil.rmtree(folder)


@pytest.mark.parametrize("limit", [0, LARGE])
def test_a_session_may_end_anywhere(limit, file, cache_dir):
    store = Store([], cache_dir, limit)
    n = len(file.tensors)
    open_in(store, file).close()
    with open_in(store, file) as stored:
        stored.write(0, 0, file.data(next(iter(file.tensors))).reshape(-1)[:100].tobytes())
        with pytest.raises(ProtocolError, match=f"{n} tensors"):
            stored.finish()
    stored.close()
    with open_in(store, file) as stored:
        assert len(stored.missing) == n
