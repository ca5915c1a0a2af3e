"""What operators return by their contract, in Python integers, numpy scalars and float64.

The formats' numbers are written out here and in `oracle.py`, so a mistake in `tagc.ops` shows. Only
shapes of layouts are read. For small inputs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support import oracle
from support.oracle import signed
from tagc.ops.bitmap import to_bitmap

F, F32, I32 = np.float32, torch.float32, torch.int32
Results = dict[str, Tensor]
_LARGEST_BFLOAT16 = F(3.3895313892515355e38)


def results(operator: str, t: dict[str, Any], o: dict[str, Any]) -> Results:
    """What an operator leaves in the tensors that it writes, by argument; ``result 0`` and so on if
    it returns tensors.

    Args:
        t: its tensors, as they are before.
        o: its other arguments.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return _CONTRACTS[operator](t, o)


def check(got: Results, want: Results, estimated: bool) -> None:
    """Compare bits, except those of NaNs.

    Args:
        estimated: whether ``residual`` has estimates, which are means: each cell's share and their
            sum round in float32, each by 2**-24 of at most the largest share.
    """
    for name, expected in want.items():
        found = got[name]
        if name == "residual" and estimated:
            largest = expected.double().abs().max().item() if expected.numel() else 0
            unit = 2.0**-22 if found.dtype == F32 else 2.0**-7
            torch.testing.assert_close(
                found, expected, rtol=unit, atol=2.0**-20 * largest, equal_nan=True
            )
        elif name == "residual":  # may have zeros of either sign
            assert oracle.same_values(found + 0.0, expected + 0.0), name
        elif found.dtype.is_floating_point:
            assert oracle.same_values(found, expected), name
        else:
            assert torch.equal(found, expected), name


def total(t: dict[str, Any], row: int, grad: str = "grad") -> np.ndarray:
    """A row of gradient plus residual in float32."""
    x = t[grad][row].float()
    left = t.get("residual")
    return (x if left is None else x + left[row].float()).numpy()


def residual_of(left: np.ndarray, stays: np.ndarray, before: Tensor, average: float) -> Tensor:
    """The residual that ``left`` becomes, except where it ``stays`` as it was."""
    if average:
        kept, fresh = F(average), F(1 - average)
        left = kept * before.float().numpy() + fresh * left
    if before.dtype == torch.bfloat16:
        left = np.clip(oracle.to_bfloat16(left), -_LARGEST_BFLOAT16, _LARGEST_BFLOAT16)
    return torch.where(torch.from_numpy(stays), before, torch.from_numpy(left).to(before.dtype))


def added_up(rows: list[np.ndarray], t: dict[str, Any], k: int, o: dict[str, Any]) -> Tensor:
    """Sum of messages, added in float32 from the first to the last, divided, rounded."""
    whole = rows[0]
    for row in rows[1:]:
        whole = whole + row
    whole = whole / F(o["divisor"])
    assert whole.dtype == F
    before = t["out"][k]
    if o.get("add"):
        whole = before.float().numpy() + whole
    return torch.from_numpy(whole).to(before.dtype)


def ints(words: Any) -> Tensor:
    """int32 of any integers."""
    return torch.tensor([signed(int(w), 32) for w in words], dtype=I32)


# Blocks


def quantize(t: dict[str, Any], o: dict[str, Any]) -> Results:
    message, residual, layout = t["message"].clone(), t["residual"], o["layout"]
    residual = None if residual is None else residual.clone()
    for r in range(len(message)):
        seed = None if t.get("dither") is None else int(t["dither"][r])
        row = oracle.quantize_row(total(t, r), layout.bits, layout.block, seed)
        message[r] = ints(row.words)
        if residual is not None:
            residual[r] = residual_of(row.left, row.bad, residual[r], o["average"])
    return {"message": message} | ({} if residual is None else {"residual": residual})


def elements_of_blocks(message: Tensor, layout: Any) -> np.ndarray:
    """The decoded values of a message ``[numel]``."""
    words = message.tolist()
    blocks = -(-layout.numel // layout.block)
    halves = [w >> 16 * i & 0xFFFF for w in words[: -(-blocks // 2)] for i in (0, 1)][:blocks]
    scale = np.array([h << 16 for h in halves], np.uint32).view(F)
    m = layout.block * layout.bits // 32
    codes = np.array(words[-(-blocks // 2) :], np.int64).reshape(blocks, 1, m)
    places = np.arange(0, 32, layout.bits)[:, None]
    q = (codes >> places) % 2**layout.bits
    q = np.where(q < 2 ** (layout.bits - 1), q, q - 2**layout.bits)
    return (q.reshape(blocks, layout.block).astype(F) * scale[:, None]).reshape(-1)[: layout.numel]


def dequantize(t: dict[str, Any], o: dict[str, Any]) -> Results:
    message = t["message"]
    sums = [
        added_up([elements_of_blocks(m, o["layout"]) for m in rows], t, k, o)
        for k, rows in enumerate(message)
    ]
    return {"out": torch.stack(sums)}


# Matrices

_DISTANCES = {1: 1.0, 2: 0.624}


def lane_sum(values: np.ndarray, lanes: int) -> np.float32:
    """Lane `l` adds elements `l`, `l + lanes`, ...; then neighbouring lanes, pair by pair."""
    totals = [F(0)] * lanes
    for i, value in enumerate(values):
        totals[i % lanes] = F(totals[i % lanes] + value)
    while len(totals) > 1:
        totals = [F(a + b) for a, b in zip(totals[::2], totals[1::2], strict=True)]
    return totals[0]


def code_sum(values: np.ndarray, width: int, group: int) -> np.float32:
    """Sum the decoded values of a row. Code `i` of word `j` has place `[i, j]` of a table, at most
    as wide as 4096 columns need. First neighbouring words are added, then halves of places."""
    lanes = 32 // width
    words, wide = -(-len(values) // lanes), 4096 // (lanes * group)
    table = [F(0)] * (lanes * wide)
    for k, value in enumerate(values):
        at = k // words * wide + k % words % wide
        table[at] = F(table[at] + value)
    for _ in range(int(math.log2(wide))):
        table = [F(a + b) for a, b in zip(table[::2], table[1::2], strict=True)]
    while len(table) > 1:
        half = len(table) // 2
        table = [F(a + b) for a, b in zip(table[:half], table[half:], strict=True)]
    return table[0]


def bits_of(value: np.float32) -> int:
    return int(F(value).view(np.uint32))


def float_of(bits: int) -> np.float32:
    return np.uint32(bits).view(F)


def digits(values: list[int], width: int) -> list[int]:
    """Pack neighbours into a word, the first in its lowest bits."""
    lanes = 32 // width
    return [
        sum(v << width * i for i, v in enumerate(values[at : at + lanes]))
        for at in range(0, len(values), lanes)
    ]


def column_scale(code: int) -> np.float32:
    """1, 0.75, 0.5, 0.375, ... for 15, 14, 13, 12, ..."""
    octaves, half = divmod(15 - code, 2)
    return F(2.0**-octaves * (0.75 if half else 1.0))


def width_of(layout: Any) -> int:
    return 4 if layout.group == 8 else layout.bits


def quantized_matrix(x: np.ndarray, layout: Any) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Words of the message of ``x`` ``[rows, columns]``, what it leaves, and which rows are not
    finite."""
    rows, columns = x.shape
    group, width = layout.group, width_of(layout)
    finite = np.isfinite(x)
    u = np.where(finite, np.minimum(np.abs(x), F(2.0**64)), F(0)).astype(F)
    good = np.array([bool(row.all()) for row in finite])
    # The upper 10 bits of the columns' sums, rounded.
    uppers = [(bits_of(lane_sum(column, 8)) + 2**21) >> 22 for column in u.T]
    codes_of_columns = [max(0, upper - max(uppers) + 15) for upper in uppers]
    v = np.array([column_scale(code) for code in codes_of_columns], F)
    exponent = (max(uppers) >> 1) - int(math.log2(rows))
    base = 0 if exponent < 67 else 8 * exponent - 136
    distance = F(layout.level * _DISTANCES[layout.bits])
    bytes_of_rows, codes, left = [], [], x.copy()
    for i in range(rows):
        row: list[int] = [0] * -(-columns // group)
        byte = 255
        if good[i]:
            at = largest_of(x[i], v, group)
            stands, norm = (u[i] * v, v * v) if layout.bits == 1 else (u[i], v)
            fit = code_sum(stands[at], width, group) / code_sum(norm[at], width, group)
            byte = min(254, ((bits_of(F(F(fit) * distance)) + 2**19) >> 20) - base)
            if byte < 1 or base == 0:
                byte = 0
        if 0 < byte < 255:
            f = float_of((byte + base) << 20)
            for k, j in enumerate(at):
                value, row[k] = element(x[i, j], f, v[j], j, layout)
                sent = float(value) * float(f) * float(v[j])
                assert float(F(sent)) == sent
                left[i, j] = F(x[i, j] - F(sent))
        bytes_of_rows.append(byte)
        codes += strided(row, width)
    words = [base, *digits(codes_of_columns, 4), *digits(bytes_of_rows, 8), *codes]
    return words, left.reshape(-1), np.repeat(~good, columns)


def largest_of(x: np.ndarray, v: np.ndarray, group: int) -> list[int]:
    """The elements that have codes: all, or of each group the first of the largest."""
    size = np.abs(x * (F(1) / v))
    assert size.dtype == F
    starts = range(0, len(x), group)
    return [max(range(s, min(len(x), s + group)), key=lambda j: (size[j], -j)) for s in starts]


def element(x: np.float32, f: np.float32, v: np.float32, j: int, layout: Any) -> tuple[int, int]:
    """The factor of `f * v` that an element's code stands for, and the code."""
    if layout.group > 1:
        negative = bool(np.signbit(x))
        return -1 if negative else 1, j % layout.group + layout.group * negative
    half = 2 ** (layout.bits - 1)
    y = F(F(F(x * F(F(1) / f)) * F(F(1) / v)) * F(0.5))
    q = int(min(max(np.floor(y), -half), half - 1))
    return 2 * q + 1, q % 2**layout.bits


def strided(codes: list[int], width: int) -> list[int]:
    """A row's codes: number `i * m + j` in place `i` of word `j` of `m`."""
    m = -(-len(codes) // (32 // width))
    words = [0] * m
    for k, code in enumerate(codes):
        words[k % m] |= code << width * (k // m)
    return words


def quantize_matrix(t: dict[str, Any], o: dict[str, Any]) -> Results:
    message, residual, layout = t["message"].clone(), t["residual"], o["layout"]
    residual = None if residual is None else residual.clone()
    numel, words = layout.rows * layout.columns, message.shape[1] // layout.count
    for d in range(len(message)):
        x = total(t, d)
        for i in range(layout.count if numel else 0):
            part = slice(i * numel, (i + 1) * numel)
            one = x[part].reshape(layout.rows, layout.columns)
            sent, left, bad = quantized_matrix(one, layout)
            message[d, i * words : (i + 1) * words] = ints(sent)
            if residual is not None:
                residual[d, part] = residual_of(left, bad, residual[d, part], o["average"])
    return {"message": message} | ({} if residual is None else {"residual": residual})


def elements_of_matrix(message: Tensor, layout: Any) -> np.ndarray:
    """The decoded values of the message of one matrix ``[rows * columns]``."""
    words = [w & oracle.MASK for w in message.tolist()]
    rows, columns, group, width = layout.rows, layout.columns, layout.group, width_of(layout)
    base, rest = words[0], words[1:]
    v = [column_scale(rest[j // 8] >> 4 * (j % 8) & 15) for j in range(columns)]
    rest = rest[-(-columns // 8) :]
    scales = [rest[i // 4] >> 8 * (i % 4) & 255 for i in range(rows)]
    rest = rest[-(-rows // 4) :]
    codes = -(-columns // group)
    m = -(-codes // (32 // width))
    out = np.zeros((rows, columns), F)
    for i, byte in enumerate(scales):
        if byte == 255:
            out[i] = np.nan
        if not 0 < byte < 255:
            continue
        f = float_of((byte + base) << 20 & oracle.MASK)
        for k in range(codes):
            code = rest[i * m + k % m] >> width * (k // m) & 2**width - 1
            j, value = k, 2 * signed(code, width) + 1
            if group > 1:
                j, value = k * group + code % group, -1 if code >= group else 1
            if j < columns:
                out[i, j] = F(F(value) * f) * v[j]
    return out.reshape(-1)


def dequantize_matrix(t: dict[str, Any], o: dict[str, Any]) -> Results:
    message, layout = t["message"], o["layout"]
    if not layout.numel:
        return {"out": t["out"]}
    sums = []
    for k, rows in enumerate(message):
        parts = [m.unflatten(0, (layout.count, -1)) for m in rows]
        whole = [np.concatenate([elements_of_matrix(one, layout) for one in m]) for m in parts]
        sums.append(added_up(whole, t, k, o))
    return {"out": torch.stack(sums)}


# Exact changes

_MANTISSA = {torch.bfloat16: 7, torch.float16: 10}


def patterns(x: Tensor) -> list[int]:
    return [k & 0xFFFF for k in x.view(torch.int16).tolist()]


def ordered(k: int) -> int:
    return k if k < 0x8000 else -(k & 0x7FFF) - 1


def pattern(number: int) -> int:
    number = signed(number, 16)
    return number if number >= 0 else -number - 1 | 0x8000


def zigzag(new: int, old: int) -> int:
    q = signed(ordered(new) - ordered(old), 16)
    return 2 * q if q >= 0 else -2 * q - 1


def blocks_of(layout: Any) -> list[tuple[int, range]]:
    """Span and elements of each block."""
    found, first = [], 0
    for span, size in enumerate(layout.spans):
        found += [
            (span, range(first + at, first + min(size, at + layout.block)))
            for at in range(0, size, layout.block)
        ]
        first += size
    return found


def widths_of(zs: list[int]) -> int:
    """The entry of a class with these numbers."""

    def at_least(b: int) -> int:
        return sum(z >= 2 ** max(b, 1) - 1 for z in zs)

    n, changed = len(zs), at_least(0)
    if not changed:
        return 0
    l = max(i for i in range(64) if changed << i <= n)  # noqa: E741
    above = [at_least(b) for b in range(16)]
    bits = {
        b1 | b2 << 4: (n * b1 if b1 else changed * (l + 1) + (n >> l))
        + above[b1] * b2
        + 16 * above[max(b1, b2)]
        for b1 in range(16)
        for b2 in range(16)
    }
    return min(bits, key=lambda entry: (bits[entry], entry))


def bits_of_block(zs: list[int], widths: list[tuple[int, int]]) -> str:
    """From bit 0 on."""

    def number(value: int, width: int) -> str:
        return f"{value:0{width}b}"[::-1] if width else ""

    def escaped(which: list[int]) -> str:
        second = [number(min(zs[j], 2 ** widths[j][1] - 1), widths[j][1]) for j in which]
        third = [number(zs[j], 16) for j in which if zs[j] >= 2 ** widths[j][1] - 1]
        return "".join(second + third)

    places = range(len(zs))
    out = "".join(number(min(zs[j], 2 ** widths[j][0] - 1), widths[j][0]) for j in places)
    out += escaped([j for j in places if widths[j][0] and zs[j] >= 2 ** widths[j][0] - 1])
    listed = [j for j in places if not widths[j][0] and zs[j]]
    if all(b1 for b1, _ in widths) or not (out or listed):
        return out
    out += number(len(listed), len(zs).bit_length())
    if listed:
        l = (len(zs) // len(listed)).bit_length() - 1  # noqa: E741
        upper = ["0"] * (len(listed) + (len(zs) - 1 >> l))
        for i, j in enumerate(listed):
            upper[(j >> l) + i] = "1"
        out += "".join(upper) + "".join(number(j % 2**l, l) for j in listed)
    return out + escaped(listed)


def exact_row(new: Tensor, old: Tensor, layout: Any) -> tuple[list[int], list[int]]:
    """Plan and message."""
    k, mantissa = patterns(old), _MANTISSA[layout.dtype]
    zs = [zigzag(a, b) for a, b in zip(patterns(new), k, strict=True)]
    blocks = blocks_of(layout)
    classes = {j: span * 32 + (k[j] >> mantissa) % 32 for span, js in blocks for j in js}
    members: dict[int, list[int]] = {}
    for j, c in classes.items():
        members.setdefault(c, []).append(zs[j])
    table = [widths_of(members.get(c, [])) for c in range(32 * len(layout.spans))]
    words = []
    for _, js in blocks:
        entries = [table[classes[j]] for j in js]
        out = bits_of_block([zs[j] for j in js], [(e & 15, e >> 4) for e in entries])
        words.append([int(out[at : at + 32][::-1], 2) for at in range(0, len(out), 32)])
    masks = [sum((e > 0) << c for c, e in enumerate(table[at : at + 32]))
             for at in range(0, len(table), 32)]  # fmt: skip
    head = [*masks, *digits([e for e in table if e], 8), *digits([len(w) for w in words], 16)]
    starts = [1 + len(head) + sum(map(len, words[:b])) for b in range(len(words))]
    coded = head + [w for block in words for w in block]
    raw = digits(patterns(new), 16)
    sent = [] if not any(zs) else coded if len(coded) < len(raw) else raw
    return [1 + len(sent), *table, *starts], [1 + len(sent), *sent]


def measure_exact(t: dict[str, Any], o: dict[str, Any]) -> Results:
    return {"plan": ints(exact_row(t["new"][0], t["old"][0], o["layout"])[0])[None]}


def encode_exact(t: dict[str, Any], o: dict[str, Any]) -> Results:
    words = ints(exact_row(t["new"][0], t["old"][0], o["layout"])[1])
    return {"message": torch.cat([words, t["message"][0, len(words) :]])[None]}


def decoded_row(message: Tensor, old: Tensor, layout: Any) -> list[int]:
    """New bit patterns."""
    words = [w & oracle.MASK for w in message.tolist()]
    total, words, k = words[0], words[1:], patterns(old)
    if total == 1:
        return k
    if total == 1 + len(digits(k, 16)):
        return [words[j // 2] >> 16 * (j % 2) & 0xFFFF for j in range(len(k))]
    spans, blocks, mantissa = len(layout.spans), blocks_of(layout), _MANTISSA[layout.dtype]
    classes = [32 * s + c for s in range(spans) for c in range(32) if words[s] >> c & 1]
    words = words[spans:]
    table = {c: words[i // 4] >> 8 * (i % 4) & 255 for i, c in enumerate(classes)}
    words = words[-(-len(classes) // 4) :]
    sizes = [words[b // 2] >> 16 * (b % 2) & 0xFFFF for b in range(len(blocks))]
    words = words[-(-len(blocks) // 2) :]
    for (span, js), size in zip(blocks, sizes, strict=True):
        bits = iter("".join(f"{w:032b}"[::-1] for w in words[:size]))
        words = words[size:]

        def number(width: int, bits: Any = bits) -> int:
            return sum(int(next(bits)) << i for i in range(width))

        def escaped(which: list[int], z: dict[int, int], widths: dict[int, Any], number=number):
            for j in which:
                z[j] = number(widths[j][1])
            for j in which:
                if z[j] == 2 ** widths[j][1] - 1:
                    z[j] = number(16)

        if not size:
            continue
        entries = {j: table.get(span * 32 + (k[j] >> mantissa) % 32, 0) for j in js}
        widths = {j: (e & 15, e >> 4) for j, e in entries.items()}
        z = {j: number(widths[j][0]) for j in js}
        escaped([j for j in js if widths[j][0] and z[j] == 2 ** widths[j][0] - 1], z, widths)
        if not all(b1 for b1, _ in widths.values()):
            n, m = number(len(js).bit_length()), len(js)
            l = (m // max(n, 1)).bit_length() - 1  # noqa: E741
            upper = [i for i in range(n + (m - 1 >> l) if n else 0) if number(1)]
            places = [(at - i << l) + number(l) for i, at in enumerate(upper)]
            escaped([js[place] for place in places], z, widths)
        for j in js:
            q = z[j] // 2 if z[j] % 2 == 0 else -(z[j] + 1) // 2
            k[j] = pattern(ordered(k[j]) + q)
    return k


def decode_exact(t: dict[str, Any], o: dict[str, Any]) -> Results:
    new = [decoded_row(m, r, o["layout"]) for m, r in zip(t["message"], t["rows"], strict=True)]
    rows = torch.tensor([[signed(k, 16) for k in row] for row in new], dtype=torch.int16)
    return {"rows": rows.view(t["rows"].shape).view(t["rows"].dtype)}


# Packed exponents


def packed_row(row: Tensor, layout: Any) -> list[int]:
    """Words."""
    sent = patterns(row)
    k = sent + [0] * (-len(sent) % 64)
    es = [x >> 7 & 255 for x in k]
    low = [x >> 8 & 0x80 | x & 0x7F for x in k]
    tops, codes, halves = [], [], []
    for at in range(0, len(k), 64):
        block = es[at : at + 64]
        there = [e for e in block if e]
        mean = sum(there) // max(len(there), 1)

        def code(e: int, top: int) -> int:
            return 14 if e == 0 else top - e if 0 <= top - e < 14 else 15

        choices = [[code(e, top) for e in block] for top in (max(block), mean + 4)]
        which = min((0, 1), key=lambda i, choices=choices: (choices[i].count(15), i))
        tops.append((max(block), mean + 4)[which])
        codes += choices[which]
        halves += [choices[which][i] | choices[which][i + 32] << 4 for i in range(32)]
    spare, fits = [], True
    for at in range(0, len(k), 4096):
        room = min(64, len(tops) - at // 64)
        found = [e for e, c in zip(es[at:], codes[at : at + 4096], strict=False) if c == 15]
        fits &= len(found) <= room
        spare += (found + [0] * room)[:room]
    words = digits(low + halves + tops + spare, 8)
    words += [0] * (-len(words) % 4)
    if fits:
        return [0, 0, 0, 0, *words]
    raw = digits(sent, 16)
    return [1, 0, 0, 0, *raw, *[0] * (layout.raw_words - 4 - len(raw))]


def pack_exponents(t: dict[str, Any], o: dict[str, Any]) -> Results:
    rows = []
    for row, before in zip(t["rows"], t["message"], strict=True):
        words = ints(packed_row(row, o["layout"]))
        rows.append(torch.cat([words, before[len(words) :]]))
    return {"message": torch.stack(rows)}


def unpacked_row(words: list[int], numel: int) -> list[int]:
    """Bit patterns."""
    sent = [w >> 8 * i & 255 for w in words[4:] for i in range(4)]
    if words[0] == 1:
        return [sent[2 * i] | sent[2 * i + 1] << 8 for i in range(numel)]
    blocks = -(-numel // 64)
    low, codes, rest = sent[: 64 * blocks], sent[64 * blocks : 96 * blocks], sent[96 * blocks :]
    tops, spare = rest[:blocks], rest[blocks : 2 * blocks]
    found = []
    for i in range(numel):
        b, k = divmod(i, 64)
        if i % 4096 == 0:
            exceptions = iter(spare[b : b + 64])
        c = codes[32 * b + k % 32] >> 4 * (k // 32) & 15
        e = 0 if c == 14 else next(exceptions) if c == 15 else tops[b] - c
        found.append((low[i] & 0x80) << 8 | e << 7 | low[i] & 0x7F)
    return found


def unpack_exponents(t: dict[str, Any], o: dict[str, Any]) -> Results:
    numel = o["layout"].numel
    new = [unpacked_row([w & oracle.MASK for w in m.tolist()], numel) for m in t["message"]]
    rows = torch.tensor([[signed(k, 16) for k in row] for row in new], dtype=torch.int16)
    return {"rows": rows.view(t["rows"].shape).view(t["rows"].dtype)}


# Sketches


def bitmap(groups: list[int], layout: Any) -> Tensor:
    present = torch.zeros(layout.groups, dtype=torch.bool)
    present[groups] = True
    return to_bitmap(present)


def encode(t: dict[str, Any], o: dict[str, Any]) -> Results:
    layout, residual = o["layout"], t["residual"]
    out: Results = {name: t[name].clone() for name in ("index", "cells", "counts")}
    if residual is not None:
        out["residual"] = residual.clone()
    for d in range(len(t["grad"])):
        support = t.get("support")
        if support is not None:
            support = oracle.bits_of(support[d].numpy(), layout.groups)
        row = oracle.encode_row(
            total(t, d), t["threshold"][d].item(), t["step"][d].item(), int(t["seed"]), layout,
            o["levels"], o["capacity"], support,
        )  # fmt: skip
        out["index"][d] = torch.cat([bitmap(row.present, layout), ints([row.poison])])
        out["cells"][d], out["counts"][d] = ints(row.cells), ints(row.counts)
        if residual is not None:
            out["residual"][d] = residual_of(row.left, row.bad, residual[d], 0.0)
    return out


def select(t: dict[str, Any], o: dict[str, Any]) -> Results:
    out, layout = {name: t[name].clone() for name in ("bitmap", "counts")}, o["layout"]
    for r, threshold in enumerate(t["threshold"].tolist()):
        x = t["x"][r].float().numpy()
        row = oracle.encode_row(x, threshold, 1.0, 0, layout, 1, o["capacity"])
        out["bitmap"][r] = bitmap(row.present, layout)
        out["counts"][r] = ints([*row.counts[:3], 0])
    return out


def decode(t: dict[str, Any], o: dict[str, Any]) -> Results:
    layout, seed, step = o["layout"], int(t["seed"]), t["step"].item()
    rows = t["index"][:, :-1].numpy()
    keys = sorted({k for row in rows for k in oracle.bits_of(row, layout.groups)})
    peeled = oracle.peel(t["cells"].tolist(), keys, seed, layout)
    found = {k: oracle.elements(v, step, layout) for k, v in peeled.values.items()}
    out = torch.from_numpy(oracle.shard(found, layout) / F(o["divisor"])).to(t["out"].dtype)
    if t["index"][:, -1].any():
        out.fill_(torch.nan)
    stats = ints([len(keys), len(peeled.stuck)])
    residual = t["residual"]
    if residual is None:
        return {"out": out, "stats": stats}
    owed = residual.double() + torch.from_numpy(oracle.estimate(peeled, seed, step, layout))
    limit = torch.finfo(residual.dtype).max
    owed = torch.where(residual.isfinite(), owed.clamp(-limit, limit), owed)
    return {"out": out, "stats": stats, "residual": owed.to(residual.dtype)}


def insert(t: dict[str, Any], o: dict[str, Any]) -> Results:
    layout, cells = o["layout"], [0] * o["layout"].cells
    for key in oracle.bits_of(t["index"].numpy(), layout.groups):
        for c in oracle.cells_of(key, int(t["seed"]), layout):
            cells[c] += int(t["symbols"][key])
    return {"cells": ints(cells)}


def peel(t: dict[str, Any], o: dict[str, Any]) -> Results:
    layout = o["layout"]
    keys = oracle.bits_of(t["index"].numpy(), layout.groups)
    found = oracle.peel(t["cells"].tolist(), keys, int(t["seed"]), layout)
    stuck = torch.zeros(layout.groups, dtype=torch.bool)
    stuck[found.stuck] = True
    symbols = ints(found.values.get(k, 0) for k in range(layout.groups))
    return {"result 0": symbols, "result 1": stuck}


# Leads, thresholds and fingerprints


def undo_lag(t: dict[str, Any], o: dict[str, Any]) -> Results:
    decoded, sent = t["decoded"].numpy(), t["sent"].numpy()
    late, share = t["weights"].numpy()
    bad = ~np.isfinite(decoded)
    out = np.where(bad, F("nan"), (decoded - late * sent) / share)
    assert out.dtype == F
    kept = np.where(bad, F(0), decoded)
    return {"out": torch.from_numpy(out).to(t["out"].dtype), "sent": torch.from_numpy(kept)}


def steer(t: dict[str, Any], o: dict[str, Any]) -> Results:
    state = t["state"].clone()
    for i, target in enumerate(t["target"].tolist()):
        for j in range(state.shape[2]):
            row = steered(
                t["counts"][i, j].tolist(), target, t["max_boost"][i].item(), t["scale"][i].item(),
                state[:, i, j].tolist(),
            )  # fmt: skip
            state[:, i, j] = torch.tensor(np.array(row))
    return {"state": state}


def steered(
    counts: list[int], target: float, most: float, scale: float, state: list[float]
) -> list[np.float32]:
    """The formulas of the contract, in float32."""
    f = F
    threshold, boost, bias, exponent, side, _ = (f(v) for v in state)
    above, nonzero, kept, saturated = (f(v) for v in counts)
    boost *= f(2) if saturated * f(64) > kept else f(0.5) if saturated * f(1024) < kept else f(1)
    boost = min(max(boost, f(1)), f(most))
    goal = max(min(f(target), f(0.9) * nonzero), f(0.5))
    ratio = min(above / (goal * bias), f(256))
    learnt = f(0.3) * (goal - kept) / goal if f(0.25) < ratio < f(4) else f(0)
    bias = min(max(bias * (f(1) + learnt), f(1)), f(4))
    now = np.sign(ratio - f(1))
    exponent *= f(0.5) if now * side < 0 else f(1.25)
    p = exponent = min(max(exponent, f(1 / 32)), f(0.5))
    factor = ((f(1) - p) + (f(1) + p) * ratio) / ((f(1) + p) + (f(1) - p) * ratio)
    factor = f(1) if nonzero == 0 else f(1 / 16) if above == 0 else factor
    threshold = min(max(threshold * factor, f(2.0**-96)), f(2.0**96))
    step = f(2.0 ** np.floor(np.log2(np.float64(threshold)))) * f(scale) if scale else f(1)
    return [threshold, boost, bias, exponent, now, step * boost]


def fingerprint(t: dict[str, Any], o: dict[str, Any]) -> Results:
    size = t["x"].element_size()
    raw = t["x"].view(torch.uint8).numpy().tobytes()
    words, end = len(raw) // 8, len(raw) // 8 * 8
    sums = [0, 0]
    for i in range(words):
        word = int.from_bytes(raw[8 * i : 8 * i + 8], "little")
        sums = [a + word * (2 * (i % n) + 1) for a, n in zip(sums, (1024, 1021), strict=True)]
    for j, at in enumerate(range(end, len(raw), size)):
        rest = int.from_bytes(raw[at : at + size], "little", signed=True)
        sums = [a + (rest << 17) * (2 * j + 1) for a in sums]
    found = torch.from_numpy(np.array([a % 2**64 for a in sums], np.uint64).view(np.int64))
    if t["changed"] is None:
        return {"sums": torch.zeros(3, dtype=torch.int64), "before": found}
    return {"changed": torch.tensor([not torch.equal(found, t["before"])])}


def put_dense(t: dict[str, Any], o: dict[str, Any]) -> Results:
    layout, message = o["layout"], t["message"].clone()
    halves = message.numpy().view(np.uint16)
    for column, numel, word in layout.pieces:
        x = t["x"][:, column : column + numel]
        if layout.wire == x.dtype:
            raw = x.contiguous().numpy(force=True) if x.dtype != torch.bfloat16 else None
            raw = x.contiguous().view(torch.int16).numpy() if raw is None else raw
            sent = raw.view(np.uint16)
        else:
            wide = x.float().numpy()
            sent = (oracle.to_bfloat16(wide).view(np.uint32) >> 16).astype(np.uint16)
            sent = np.where(np.isnan(wide), np.uint16(0x7FC0), sent)
        if sent.shape[1] % 2:
            sent = np.pad(sent, ((0, 0), (0, 1)))
        halves[:, 2 * word : 2 * word + sent.shape[1]] = sent
    if t["stamp"] is None:
        return {"message": message}
    stamp = torch.stack((t["stamp"][0], t["stamp"][1] + 1))
    message[:, layout.tail : layout.tail + 2] = stamp
    return {"message": message, "stamp": stamp}


def sum_dense(t: dict[str, Any], o: dict[str, Any]) -> Results:
    layout, message, out = o["layout"], t["message"], t["out"].clone()
    spoilt = t["wrong"] is not None and bool(t["wrong"])
    if t["stamp"] is not None:
        stamps = message[..., layout.tail : layout.tail + 2].reshape(-1, 2).tolist()
        spoilt = any(stamp != t["stamp"].tolist() for stamp in stamps)
    for k in range(len(out)):
        for piece in layout.pieces:
            rows = [wide_piece(row, layout, piece) for row in message[k]]
            total = rows[0]
            for row in rows[1:]:
                total = total + row
            if len(rows) == o["divisor"] == 1 and out.dtype == torch.float16:
                total = np.where(np.isfinite(total), np.clip(total, F(-65504), F(65504)), total)
            total = torch.from_numpy(total / F(o["divisor"]))
            assert total.dtype == F32
            out[k, piece.column : piece.column + piece.numel] = total.to(out.dtype)
    found = {"out": torch.full_like(out, torch.nan) if spoilt else out}
    return found if t["stamp"] is None else found | {"wrong": torch.tensor([spoilt])}


def quantize_and_put(t: dict[str, Any], o: dict[str, Any]) -> Results:
    put = put_dense(t | {"message": t["whole"]}, {"layout": o["dense"]})
    return {"whole": put.pop("message"), **put, **quantize(t, o)}


def dequantize_and_sum(t: dict[str, Any], o: dict[str, Any]) -> Results:
    pieces = {"message": t["whole"], "out": t["rows"], "stamp": t["stamp"], "wrong": t["wrong"]}
    total = sum_dense(pieces, o | {"layout": o["dense"]})
    out = dequantize(t, o)["out"]
    spoilt = t["wrong"] is not None and bool(total.get("wrong", t["wrong"]))
    return {
        "rows": total.pop("out"), **total, "out": torch.full_like(out, torch.nan) if spoilt else out
    }  # fmt: skip


def wide_piece(message: Tensor, layout: Any, piece: Any) -> np.ndarray:
    """The elements of a piece in float32."""
    words = -(-piece.numel * layout.wire.itemsize // 4)
    raw = message[piece.word : piece.word + words].contiguous().numpy()
    if layout.wire == torch.bfloat16:
        return (raw.view(np.uint16)[: piece.numel].astype(np.uint32) << 16).view(F)
    return raw.view(np.float16 if layout.wire == torch.float16 else F)[: piece.numel].astype(F)


_CONTRACTS = {
    contract.__name__: contract
    for contract in (
        quantize, dequantize, quantize_matrix, dequantize_matrix, measure_exact, encode_exact,
        decode_exact, pack_exponents, unpack_exponents, encode, select, decode, insert, peel,
        undo_lag, steer, fingerprint, put_dense, sum_dense, quantize_and_put,
        dequantize_and_sum,
    )
}  # fmt: skip
