"""How blocks become codes and scales: the part of the kernels that depends on the type.

A row is read in chunks: 16 bytes of its codes, 4 words of 32 bits. A chunk holds PARTS runs of 16
weights that share a scale; run i of a row is weights [16 i, 16 i + 16). Chunk c has as its part p
the run (c // SPAN) * SPAN * PARTS + p * SPAN + c % SPAN. Word t of a part has, in its byte b, the
code of the run's weight 4 t + b, a signed byte; the weight is scale * code + minimum.

Of each type there are three functions:
`load(q, high, n, c, n_blocks)` reads chunks c [C] of rows n [N] (int64): words, and what more
bits the codes have elsewhere, [N, C, 4] or [N, C, 1];
`codes(words, more, c, p, ASM)` makes the codes of part p from them: int32 [N, C, 4];
`scales(q, scales, d, n, c, p, n_blocks)`: scale and minimum of part p, float32 [N, C]. Types
without a minimum give the scale twice.
ASM is off in the interpreter, which has no inline assembly.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import struct
from typing import Any, NamedTuple

import triton
import triton.language as tl
from gguf import GGMLQuantizationType

_LOW_NIBBLES = tl.constexpr(0x0F0F0F0F)
_LOW_PAIRS = tl.constexpr(0x03030303)
_LOW_BITS = tl.constexpr(0x01010101)
_SIX_BITS = tl.constexpr(0x3F3F3F3F)
_HIGH_PAIRS = tl.constexpr(0x30303030)
_SIGNS = tl.constexpr(-0x7F7F7F80)
_SPREAD = tl.constexpr(0x00204081)
"""Times a nibble, this puts bit i into bit 0 of byte i."""


@triton.jit
def dot4(a, b, total, ASM: tl.constexpr):
    """Total + the four products of the signed bytes of int32 `a` and `b`."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], tl.int32, True, 1
        )
    for i in tl.static_range(4):
        total += byte(a, i) * byte(b, i)
    return total


@triton.jit
def byte(word, B: tl.constexpr):
    """Byte B of int32 `word`, with its sign."""
    return (word << (24 - 8 * B)) >> 24


@triton.jit
def number(word, B: tl.constexpr):
    """Byte B of int32 `word`, with its sign, as float32.

    Many GPUs convert slowly. Put below the top byte of 2^23, the byte is a number at once.
    """
    bits = (((word ^ _SIGNS) >> (8 * B)) & 0xFF) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def words(plane, row, offset):
    """Four words at `offset` [C] of the rows that begin at `row` [N]: int32 [N, C, 4]."""
    t = tl.arange(0, 4)
    return tl.load(plane + row[:, None, None] + (offset[None, :, None] + t[None, None, :]))


@triton.jit
def pair(word):
    """The two float16 in int32 `word`, the lower one first, as float32."""
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _entry(i, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr):
    """Byte i of the 16 in T0 to T3, as int32 in [0, 256)."""
    word = tl.where(i < 8, tl.where(i < 4, T0, T1), tl.where(i < 12, T2, T3))
    return (word >> (i % 4 * 8)) & 0xFF


@triton.jit
def _table_codes(word, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr):
    """The nibbles of `word` looked up: codes of the low ones, and of the high ones."""
    low = word & 0
    high = word & 0
    for b in tl.static_range(4):
        low |= _entry((word >> (8 * b)) & 15, T0, T1, T2, T3) << (8 * b)
        high |= _entry((word >> (8 * b + 4)) & 15, T0, T1, T2, T3) << (8 * b)
    return low, high


def _table_asm(t0: int, t1: int, t2: int, t3: int) -> str:
    """PTX of `_table_codes`: the nibbles of $2 looked up, the low ones to $0, the high ones to $1.

    prmt takes four bytes out of eight by the four lowest nibbles of its last operand, whose top
    bits must be clear; both halves of the table are read and the top bits choose.
    """
    t0, t1, t2, t3 = (t & 0xFFFFFFFF for t in (t0, t1, t2, t3))
    lines = [".reg .b32 i, s, a, b;"]
    for half in ("$0", "$1"):
        lines += [
            "and.b32 i, $2, 0x77777777;" if half == "$0" else "shr.u32 i, i, 16;",
            f"prmt.b32 a, {t0:#x}, {t1:#x}, i;",
            f"prmt.b32 b, {t2:#x}, {t3:#x}, i;",
            "and.b32 s, $2, 0x88888888;" if half == "$0" else "",
            "shr.u32 s, s, 1;" if half == "$0" else "",
            "or.b32 s, s, 0x32103210;" if half == "$0" else "shr.u32 s, s, 16;",
            f"prmt.b32 {half}, a, b, s;",
        ]
    lines += ["mov.b32 a, $0;", "prmt.b32 $0, a, $1, 0x6420;", "prmt.b32 $1, a, $1, 0x7531;"]
    return "{ " + " ".join(line for line in lines if line) + " }"


def _packed(values: tuple[int, ...]) -> tuple[int, ...]:
    return struct.unpack("<4i", struct.pack("<16b", *values))


# The 16 values of a code, from ggml; those of MXFP4 are twice those of E2M1.
_IQ4 = _packed((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
_MXFP4 = _packed((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
_IQ4_ASM = tl.constexpr(_table_asm(*_IQ4))
_MXFP4_ASM = tl.constexpr(_table_asm(*_MXFP4))
_I0, _I1, _I2, _I3 = (tl.constexpr(word) for word in _IQ4)
_M0, _M1, _M2, _M3 = (tl.constexpr(word) for word in _MXFP4)


@triton.jit
def _load_plain(q, high, n, c, n_blocks, CHUNKS: tl.constexpr):
    w = words(q, n * (n_blocks * (4 * CHUNKS)), c * 4)
    return w, w


@triton.jit
def _load_32(q, high, n, c, n_blocks):
    return _load_plain(q, high, n, c, n_blocks, 1)


@triton.jit
def _load_q8_0(q, high, n, c, n_blocks):
    return _load_plain(q, high, n, c, n_blocks, 2)


@triton.jit
def _load_q2_k(q, high, n, c, n_blocks):
    return _load_plain(q, high, n, c, n_blocks, 4)


@triton.jit
def _load_iq4_xs(q, high, n, c, n_blocks):
    return _load_plain(q, high, n, c, n_blocks, 8)


@triton.jit
def _load_q5(q, high, n, c, n_blocks):
    bits = tl.load(high + (n * n_blocks)[:, None] + c[None, :])
    return words(q, n * (n_blocks * 4), c * 4), bits[:, :, None]


@triton.jit
def _load_q3_k(q, high, n, c, n_blocks):
    more = words(high, n * (n_blocks * 8), c // 4 * 8 + c % 2 * 4)
    return words(q, n * (n_blocks * 16), c * 4), more


@triton.jit
def _load_q4_k(q, high, n, c, n_blocks):
    w = words(q, n * (n_blocks * 36), c // 8 * 36 + (c % 8 * 4 + 4))
    return w, w


@triton.jit
def _load_q5_k(q, high, n, c, n_blocks):
    row = n * (n_blocks * 44)
    more = words(q, row, c // 8 * 44 + (c % 2 * 4 + 4))
    return words(q, row, c // 8 * 44 + (c % 8 * 4 + 12)), more


@triton.jit
def _load_q6_k(q, high, n, c, n_blocks):
    more = words(high, n * (n_blocks * 16), c // 4 * 8 + c % 2 * 4)
    return words(q, n * (n_blocks * 32), c * 4), more


@triton.jit
def _codes_nibbles(w, more, c, p: tl.constexpr, ASM: tl.constexpr):
    return (w >> (4 * p)) & _LOW_NIBBLES


@triton.jit
def _codes_bytes(w, more, c, p: tl.constexpr, ASM: tl.constexpr):
    return w


@triton.jit
def _codes_iq4(w, more, c, p: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        low, high = tl.inline_asm_elementwise(
            _IQ4_ASM, "=r,=r,r", [w], (tl.int32, tl.int32), True, 1
        )
    else:
        low, high = _table_codes(w, _I0, _I1, _I2, _I3)
    return low if p == 0 else high


@triton.jit
def _codes_mxfp4(w, more, c, p: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        low, high = tl.inline_asm_elementwise(
            _MXFP4_ASM, "=r,=r,r", [w], (tl.int32, tl.int32), True, 1
        )
    else:
        low, high = _table_codes(w, _M0, _M1, _M2, _M3)
    return low if p == 0 else high


@triton.jit
def _codes_q5(w, more, c, p: tl.constexpr, ASM: tl.constexpr):
    """Bit 16 p + 4 t + b is the fifth of byte b of word t."""
    t = tl.arange(0, 4)
    bits = (more >> (16 * p + 4 * t)[None, None, :]) & 15
    spread = (bits * _SPREAD) & _LOW_BITS
    return ((w >> (4 * p)) & _LOW_NIBBLES) | (spread << 4)


@triton.jit
def _codes_q5_k(w, more, c, p: tl.constexpr, ASM: tl.constexpr):
    group = c % 8 // 2 * 2 + p
    bits = (more >> group[None, :, None]) & _LOW_BITS
    return ((w >> (4 * p)) & _LOW_NIBBLES) | (bits << 4)


@triton.jit
def _codes_q6_k(w, more, c, p: tl.constexpr, ASM: tl.constexpr):
    shift = c % 4 // 2 * 2 + 4 * p
    pairs = (more >> shift[None, :, None]) & _LOW_PAIRS
    return ((w >> (4 * p)) & _LOW_NIBBLES) | (pairs << 4)


@triton.jit
def _codes_q2_k(w, more, c, p: tl.constexpr, ASM: tl.constexpr):
    return (w >> (2 * p)) & _LOW_PAIRS


@triton.jit
def _codes_q3_k(w, more, c, p: tl.constexpr, ASM: tl.constexpr):
    bits = (more >> (c % 4 // 2 * 4 + p)[None, :, None]) & _LOW_BITS
    return ((w >> (2 * p)) & _LOW_PAIRS) | (bits << 2)


@triton.jit
def _at(plane, row, offset):
    """Elements at `offset` [C] of the rows that begin at `row` [N]: [N, C]."""
    return tl.load(plane + row[:, None] + offset[None, :])


@triton.jit
def _scales_signed(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    """Codes that are signed: there is no minimum."""
    s = _at(d, n * n_blocks, c).to(tl.float32)
    return s, s


@triton.jit
def _scales_q8_0(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    s = _at(d, n * n_blocks, c // 2).to(tl.float32)
    return s, s


@triton.jit
def _scales_q4_0(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    s = _at(d, n * n_blocks, c).to(tl.float32)
    return s, s * -8


@triton.jit
def _scales_q5_0(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    s = _at(d, n * n_blocks, c).to(tl.float32)
    return s, s * -16


@triton.jit
def _scales_pair(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    return pair(_at(d, n * n_blocks, c))


@triton.jit
def _scales_mxfp4(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    """2^(e - 128), which for e below 2 is subnormal."""
    e = _at(d, n * n_blocks, c).to(tl.int32)
    bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23)
    s = bits.to(tl.float32, bitcast=True)
    return s, s


@triton.jit
def _scales_iq4_xs(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    row = n * (n_blocks * 2)
    head = _at(d, row, c // 8 * 2)
    low = _at(d, row, c // 8 * 2 + 1)
    group = (c % 8)[None, :]
    code = ((low >> (group * 4)) & 15) | (((head >> (16 + group * 2)) & 3) << 4)
    s = pair(head)[0] * (code - 32).to(tl.float32)
    return s, s


@triton.jit
def _scales_q2_k(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    run = c // 2 * 8 + p * 2 + c % 2
    code = _at(scales, n * (n_blocks * 16), run).to(tl.int32)
    d_scale, d_minimum = pair(_at(d, n * n_blocks, c // 4))
    return d_scale * (code & 15).to(tl.float32), d_minimum * -(code >> 4).to(tl.float32)


@triton.jit
def _scales_q3_k(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    """Run i of a block: nibble i // 8 of byte i % 8 below pair i // 4 of byte 8 + i % 4."""
    run = c % 4 // 2 * 8 + p * 2 + c % 2
    row = n * (n_blocks * 12)
    first = c // 4 * 12
    low = _at(scales, row, first + run % 8).to(tl.int32) >> (run // 8 * 4)[None, :]
    high = _at(scales, row, first + 8 + run % 4).to(tl.int32) >> (run // 4 * 2)[None, :]
    code = (low & 15) | ((high & 3) << 4)
    s = _at(d, n * n_blocks, c // 4).to(tl.float32) * (code - 32).to(tl.float32)
    return s, s * -4


@triton.jit
def _scales_k4(q, n, c, p: tl.constexpr, n_blocks, BLOCK_WORDS: tl.constexpr):
    """Of Q4_K and Q5_K: six bits each for 8 scales and 8 minima, in three words of four bytes.

    Six bits of scales 0 to 3, of minima 0 to 3, and nibbles of scales and minima 4 to 7, whose
    upper pairs sit on top of the first two words.
    """
    row = n * (n_blocks * BLOCK_WORDS)
    first = c // 8 * BLOCK_WORDS
    w0 = _at(q, row, first + 1)
    w1 = _at(q, row, first + 2)
    w2 = _at(q, row, first + 3)
    group = c % 8 // 2 * 2 + p
    is_low = (group < 4)[None, :]
    s = tl.where(is_low, w0 & _SIX_BITS, (w2 & _LOW_NIBBLES) | ((w0 >> 2) & _HIGH_PAIRS))
    m = tl.where(is_low, w1 & _SIX_BITS, ((w2 >> 4) & _LOW_NIBBLES) | ((w1 >> 2) & _HIGH_PAIRS))
    shift = (group % 4 * 8)[None, :]
    d_scale, d_minimum = pair(_at(q, row, first))
    scale = ((s >> shift) & 0xFF).to(tl.float32)
    minimum = ((m >> shift) & 0xFF).to(tl.float32)
    return d_scale * scale, d_minimum * -minimum


@triton.jit
def _scales_q4_k(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    return _scales_k4(q, n, c, p, n_blocks, 36)


@triton.jit
def _scales_q5_k(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    return _scales_k4(q, n, c, p, n_blocks, 44)


@triton.jit
def _scales_q6_k(q, scales, d, n, c, p: tl.constexpr, n_blocks):
    run = c // 4 * 8 + p * 4 + c % 4
    code = _at(scales, n * (n_blocks * 16), run)
    s = _at(d, n * n_blocks, c // 8).to(tl.float32) * code.to(tl.float32)
    return s, s * -32


class Decoder(NamedTuple):
    """What the kernels are told about a type; see the module."""

    PARTS: int
    SPAN: int
    MINIMUM: bool
    LOAD: Any
    CODES: Any
    SCALES: Any


_Type = GGMLQuantizationType

DECODERS: dict[GGMLQuantizationType, Decoder] = {
    _Type.Q4_0: Decoder(2, 1, True, _load_32, _codes_nibbles, _scales_q4_0),
    _Type.Q4_1: Decoder(2, 1, True, _load_32, _codes_nibbles, _scales_pair),
    _Type.Q5_0: Decoder(2, 1, True, _load_q5, _codes_q5, _scales_q5_0),
    _Type.Q5_1: Decoder(2, 1, True, _load_q5, _codes_q5, _scales_pair),
    _Type.Q8_0: Decoder(1, 1, False, _load_q8_0, _codes_bytes, _scales_q8_0),
    _Type.IQ4_NL: Decoder(2, 1, False, _load_32, _codes_iq4, _scales_signed),
    _Type.MXFP4: Decoder(2, 1, False, _load_32, _codes_mxfp4, _scales_mxfp4),
    _Type.IQ4_XS: Decoder(2, 1, False, _load_iq4_xs, _codes_iq4, _scales_iq4_xs),
    _Type.Q2_K: Decoder(4, 2, True, _load_q2_k, _codes_q2_k, _scales_q2_k),
    _Type.Q3_K: Decoder(4, 2, True, _load_q3_k, _codes_q3_k, _scales_q3_k),
    _Type.Q4_K: Decoder(2, 2, True, _load_q4_k, _codes_nibbles, _scales_q4_k),
    _Type.Q5_K: Decoder(2, 2, True, _load_q5_k, _codes_q5_k, _scales_q5_k),
    _Type.Q6_K: Decoder(2, 4, True, _load_q6_k, _codes_q6_k, _scales_q6_k),
}
