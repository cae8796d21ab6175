"""The rotating copies of a stage's input and output, and every wait between stages.

For stage s and copy c, with `free`, `filled` and `done` as below:

    ship(s, c):  X[s] waits done[s][c]        the output is there
                 X[s] waits free[s+1][c]      the reader of ubatch u - n_copies is through
                 inp[s+1][c] <- out[s][c] on X[s];  filled[s+1][c] recorded on X[s]
    run(s, c):   I[s] waits filled[s][c]      the input is there
                 S[s] waits filled[s+1][c]    my output of ubatch u - n_copies was shipped
                 load (input -> work memory) on I[s]; free[s][c] recorded on I[s]
                 compute; done[s][c] recorded on S[s]

S is the stage's compute stream, X its outgoing copy stream. I takes inputs in: it is S, except that
a stage on another machine sends on one and receives on the other, so that several ubatches are on
their way; there S waits free[s][c] before it receives. The guard stands on the stream that does the
copy. `free` is recorded before the stage computes, so a copy is lent for as short as possible. The
fifth wait is the host's, for `done` of the last stage, in the executor.

Chosen tokens go from the last stage L back to the first, in parcels p (pipeline/feedback.py), while
the host has queued the ubatches that read them. F is a stream of the last device:

    choose(p):   S[L] waits filled[p]         what it held before was shipped
                 out[p] is written by S[L];  chosen[p] recorded on S[L]
    return(p):   F waits chosen[p]            the tokens are there
                 inp[p] <- out[p] on F;  filled[p] recorded on F
    read(p):     S[0] waits filled[p]         for every p that the ubatch reads

`inp[p]` needs no guard: a ubatch that leaves new tokens in p was queued behind all that read the
old ones, and it comes to L, and its tokens to F, by way of S[0], where it is behind them too. With
one stage all of this is one buffer and one stream, in order: nothing is copied or waited for.
Whether a ubatch computes or is skipped, its waits and records are the same.
"""

from dataclasses import dataclass

from gguf_pp.backend.base import Backend, Buffer, Event


@dataclass(frozen=True, slots=True)
class Copy:
    """One rotating input of a stage, and the output that goes with it.

    `inp` is None on the first stage (tokens come from the host), `out` on the last (logits are
    consumed where they are made); both are None between two workers that are linked to each other.
    `filled` belongs to `inp`, `free` passes when it may be overwritten, `done` when `out` is
    complete.
    """

    inp: Buffer | None
    out: Buffer | None
    filled: Event
    free: Event
    done: Event


class Ring:
    """The `n_copies` copies of one stage, allocated together and given back together."""

    def __init__(
        self, backend: Backend, n_copies: int, n_rows: int, n_cols: int, *, inp: bool, out: bool
    ) -> None:
        """Allocate inputs and outputs [n_rows, n_cols], where the stage has them (`inp`, `out`);
        raises OutOfMemory, keeping nothing."""
        self._backend = backend
        self.n_bytes = 0
        self.copies: list[Copy] = []
        try:
            for i_copy in range(n_copies):
                mine = self._buffer(n_rows, n_cols, f"input copy {i_copy}") if inp else None
                next_one = self._buffer(n_rows, n_cols, f"output copy {i_copy}") if out else None
                events = (backend.event(), backend.event(), backend.event())
                self.copies.append(Copy(mine, next_one, *events))
        except BaseException:
            self.release()
            raise

    def _buffer(self, n_rows: int, n_cols: int, what: str) -> Buffer:
        buffer = self._backend.buffer(n_rows, n_cols, what)
        self.n_bytes += buffer.n_bytes
        return buffer

    def release(self) -> None:
        """Drop all copies and give their bytes back."""
        self.copies.clear()
        self._backend.release(self.n_bytes)
        self.n_bytes = 0
