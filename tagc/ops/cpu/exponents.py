"""The operators of packed exponents. Loops over a block's elements have a fixed length and do not
branch, so that LLVM vectorizes them; exceptions are rare, and only chunks that have any look for
them."""

from __future__ import annotations

import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from tagc.ops.cpu.arrays import N, U, bits16, compiled
from tagc.ops.exponents import ABOVE_MEAN, BLOCK, CHUNK, EXCEPTION, HEAD, ZERO, ExponentLayout

B, H = np.uint8, np.uint16
_BLOCK, _HALF, _CHUNK = BLOCK, BLOCK // 2, CHUNK
_ZERO, _EXCEPTION = H(ZERO), H(EXCEPTION)
_ABOVE_MEAN = H(ABOVE_MEAN)


def pack_exponents(rows: Tensor, message: Tensor, *, layout: ExponentLayout) -> None:
    for row, words in zip(rows, message, strict=True):
        out = words.view(torch.uint8).numpy()
        out[: 4 * HEAD] = 0
        if _pack(bits16(row), out[4 * HEAD : 4 * layout.words]):
            continue
        out[0] = 1
        end = 4 * HEAD + 2 * layout.numel
        words.view(torch.uint8)[4 * HEAD : end] = row.view(torch.uint8)
        out[end : 4 * layout.raw_words] = 0


def unpack_exponents(message: Tensor, rows: Tensor, *, layout: ExponentLayout) -> None:
    for words, row in zip(message, rows, strict=True):
        sent = words.view(torch.uint8)[4 * HEAD :]
        if int(words[0]) == 1 and len(words) >= layout.raw_words:
            row.view(torch.uint8).copy_(sent[: 2 * layout.numel])
        else:
            _unpack(sent.numpy(), bits16(row))


@register_jitable
def _top(x, first):
    """The exponent from which a block's codes count, and whether a code is an exception."""
    high, below = H(0), H(0xFFFF)
    for j in range(_BLOCK):
        e = H(H(x[first + N(j)] >> H(7)) & H(255))
        high = max(high, e)
        below = min(below, H(e - H(1)))  # of 0, the largest
    if below == H(0xFFFF):
        return H(0), False
    if H(high - below) <= _ZERO:
        return high, False
    total, count = U(0), U(0)
    for j in range(_BLOCK):
        e = H(H(x[first + N(j)] >> H(7)) & H(255))
        total += U(e)
        count += U(e > H(0))
    other = H(H(total // count) + _ABOVE_MEAN)
    of_high, of_other = U(0), U(0)
    for j in range(_BLOCK):
        e = H(H(x[first + N(j)] >> H(7)) & H(255))
        of_high += U((e > H(0)) & (H(high - e) >= _ZERO))
        of_other += U((e > H(0)) & (H(other - e) >= _ZERO))
    return (other if of_other < of_high else high), True


@register_jitable
def _pack_block(x, first, top, low, codes):
    """Write sign and mantissa of a block's elements, and their codes, two in a byte."""
    for j in range(_BLOCK):
        k = x[first + N(j)]
        low[j] = B(H(H(k >> H(8)) & H(0x80)) | H(k & H(0x7F)))
    for j in range(_HALF):
        a = H(H(x[first + N(j)] >> H(7)) & H(255))
        b = H(H(x[first + N(j + _HALF)] >> H(7)) & H(255))
        c, d = min(H(top - a), _EXCEPTION), min(H(top - b), _EXCEPTION)
        c = _EXCEPTION if c == _ZERO else c
        d = _EXCEPTION if d == _ZERO else d
        c = _ZERO if a == H(0) else c
        d = _ZERO if b == H(0) else d
        codes[j] = B(H(c | H(d << H(4))))


@compiled
def _pack(x, out):
    """Write a packed row. Returns whether all exceptions fit; if not, ``out`` is unfinished.

    Args:
        x: ``[numel]`` uint16.
        out: the message after its head, uint8.
    """
    numel = N(x.size)
    blocks = (numel + N(_BLOCK - 1)) // N(_BLOCK)
    codes, tops = N(_BLOCK) * blocks, N(_BLOCK + _HALF) * blocks
    spare = tops + blocks
    last = np.zeros(_BLOCK, H)
    at, end = spare, spare
    for b in range(blocks):
        if N(b) % N(_CHUNK) == N(0):
            for i in range(at, end):
                out[i] = B(0)
            at = spare + N(b)
            end = min(at + N(_CHUNK), spare + blocks)
        source, first = x, N(b) * N(_BLOCK)
        if first + N(_BLOCK) > numel:
            for j in range(first, numel):
                last[j - first] = x[j]
            source, first = last, N(0)
        top, exceptions = _top(source, first)
        out[tops + N(b)] = B(top)
        low = out[N(_BLOCK) * N(b) :][:_BLOCK]
        _pack_block(source, first, top, low, out[codes + N(_HALF) * N(b) :][:_HALF])
        if exceptions:
            for j in range(_BLOCK):
                e = H(H(source[first + N(j)] >> H(7)) & H(255))
                if e > H(0) and H(top - e) >= _ZERO:
                    if at == end:
                        return False
                    out[at] = B(e)
                    at += N(1)
    for i in range(at, N(out.size)):
        out[i] = B(0)
    return True


@compiled
def _unpack(sent, x):
    """Read a packed row.

    Args:
        sent: the message after its head, uint8.
        x: ``[numel]`` uint16, written.
    """
    numel = N(x.size)
    blocks = (numel + N(_BLOCK - 1)) // N(_BLOCK)
    codes, tops = N(_BLOCK) * blocks, N(_BLOCK + _HALF) * blocks
    spare = tops + blocks
    last = np.empty(_BLOCK, H)
    at, end = spare, spare
    for b in range(blocks):
        if N(b) % N(_CHUNK) == N(0):
            at = spare + N(b)
            end = min(at + N(_CHUNK), spare + blocks)
        target, first = x, N(b) * N(_BLOCK)
        short = first + N(_BLOCK) > numel
        if short:
            target, first = last, N(0)
        low = sent[N(_BLOCK) * N(b) :][:_BLOCK]
        code = sent[codes + N(_HALF) * N(b) :][:_HALF]
        top = H(sent[tops + N(b)])
        found = B(0)
        for j in range(_HALF):
            c, d = B(code[j] & B(15)), B(code[j] >> B(4))
            a = H(0) if c == B(ZERO) else H(H(top - H(c)) & H(255))
            e = H(0) if d == B(ZERO) else H(H(top - H(d)) & H(255))
            target[first + N(j)] = _element(low[j], a)
            target[first + N(j + _HALF)] = _element(low[j + _HALF], e)
            found |= B(c == B(EXCEPTION)) | B(d == B(EXCEPTION))
        if found:
            for j in range(_BLOCK):
                c = B(code[j] & B(15)) if j < _HALF else B(code[j - _HALF] >> B(4))
                if c == B(EXCEPTION):
                    target[first + N(j)] = _element(low[j], H(sent[at]) if at < end else H(0))
                    at += N(1)
        if short:
            for j in range(N(b) * N(_BLOCK), numel):
                x[j] = last[j - N(b) * N(_BLOCK)]


@register_jitable(inline="always")
def _element(low, exponent):
    """The bits of an element."""
    return H(H(H(H(H(low) & H(0x80)) << H(8)) | H(exponent << H(7))) | H(H(low) & H(0x7F)))
