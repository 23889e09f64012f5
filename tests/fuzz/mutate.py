"""Damage to files: half written, from another program, or malicious.

`mutated(name, raw, rng)` parses a file as far as its format is known, changes something inside, and reassembles it
with fitting checksums and lengths, so that readers don't refuse every change at once. There is a function for each
format.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import random
import re
import struct
import zipfile
import zlib
from contextlib import suppress
from pathlib import PurePath

import yaml

PACKERS = {".xz": lzma, ".gz": gzip, ".bz2": bz2}
NUMBERS = (
    0, 1, -1, 2, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**31),
    -(2**63), 10**6, 10**9, 10**12, 10**18, 10**40, 10**400, 0.5, -0.0, 1e-320, 1e308, 1.5, float("inf"),
    float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", " ", "x", "\0", "\ud800", "é", "\u2028", "\U0001f389", "../../../../etc/passwd", "/dev/zero", "a/b", "@x", "~",
    "None", "nan", "1e400", "(a+)+$", "x" * 5_000, "[" * 300, "- " * 300, "{{ 1 / 0 }}", "!!python/name:os.system",
)  # fmt: skip
NESTED = ([], {}, [[]], [None], {"": None}, {"a": {"b": {"c": []}}}, [1, "a", None])
VALUES = (None, True, False, *NESTED, *NUMBERS, *TEXTS)
YAML_PIECES = (
    "&a [*a]", "!!python/object/apply:os.abort []", "!!binary xx", "!!timestamp x", "!!set {a, b}", "{? [a] : b}",
    "*nobody", "!!float ''", "2001-99-99", "1:2:3", "<<: 1", "!!omap [a]", "|\n x", "'", "\t", "%", "{<<: [1]}", "0x",
    "&x " + "[" * 150 + "]" * 150,
)  # fmt: skip
WORDS = (
    b"-1", b"1e999", b"NaN", b"99999999999999999999", b"0", b"null", b"[", b"{", b'"', b"\\ud800", b"\t", b"\n", b"\0"
)  # fmt: skip


def mutated(name: str, raw: bytes, rng: random.Random) -> bytes:
    """Return the content of file `name` with one or two changes."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        change = format_of(name, raw) if rng.random() < 0.7 else any_bytes
        try:
            raw = change(raw, rng)
        except Exception:  # the first change broke the format
            raw = any_bytes(raw, rng)
    return raw


def format_of(name, raw):
    """Return the mutation of the file's format."""
    for place, magic, change in (
        (0, b"PK", zipped), (0, b"\x89PNG", png), (0, b"\x93NUMPY", npy), (0, b"SUBQUADT", shard), (257, b"ustar", tar)
    ):  # fmt: skip
        if raw[place:].startswith(magic):
            return change
    known = {
        ".json": json_text, ".yaml": yaml_text, ".yml": yaml_text, ".jsonl": json_lines, ".safetensors": safetensors,
        ".tsv": text, ".txt": text, ".bpe": text, ".jinja": text, **dict.fromkeys(PACKERS, packed),
    }  # fmt: skip
    return known.get(PurePath(name).suffix, any_bytes)


def any_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Change bytes without regard to the format: bits, cuts, splices, integers at their limits."""
    data = bytearray(raw)
    at, end = sorted((rng.randrange(len(data) + 1), min(len(data), rng.randrange(len(data) + 1))))
    kind = rng.randrange(9)
    if kind == 0 and data:
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at : min(end, at + rng.choice((1, 4, 64, 4_096)))]
    elif kind == 3:
        data[at:at] = data[at : min(end, at + 4_096)]
    elif kind == 4:
        data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
    elif kind == 5:
        size = rng.choice((1, 2, 4, 8))
        number = rng.choice((0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size - 1) - 1, 255))
        data[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
    elif kind == 6 and data:
        other, length = rng.randrange(len(data)), rng.choice((1, 16, 256))
        data[at : at + length] = data[other : other + length]
    elif kind == 7:
        data[at:at] = rng.choice(WORDS)
    elif found := list(re.finditer(rb"-?\d+(\.\d+)?", bytes(data))):
        place = rng.choice(found)
        data[place.start() : place.end()] = str(rng.choice(NUMBERS)).encode()
    return bytes(data)


def text(raw: bytes, rng: random.Random) -> bytes:
    lines = raw.split(b"\n")
    at, kind = rng.randrange(len(lines)), rng.randrange(6)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, rng.choice(lines))
    elif kind == 2:
        lines[at] = b""
    elif kind == 3:
        cells = lines[at].split(b"\t")
        cells[rng.randrange(len(cells))] = str(rng.choice(VALUES)).encode("utf-8", "surrogatepass")
        lines[at] = b"\t".join(cells)
    elif kind == 4:
        lines[at] += rng.choice(WORDS)
    else:
        lines[at] = lines[at].replace(b"\t", b" ", 1)
    return b"\n".join(lines)


def changed(value, rng: random.Random):
    """Return a copy of plain values with one change somewhere inside."""
    value = json.loads(json.dumps(value))
    places = list(inner_places(value))
    if not places:
        return rng.choice(VALUES)
    holder, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[str(rng.choice(TEXTS)) if rng.random() < 0.5 else f"{key}x"] = holder.pop(key)
    elif kind == 2:
        for _ in range(rng.choice((1, 2, 40, 120, 2_000))):
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
    elif kind == 3:
        other, place = rng.choice(places)
        holder[key] = other[place] if not isinstance(other[place], dict | list) else rng.choice(VALUES)
    elif kind == 4 and isinstance(holder, list):
        holder[key:key] = [holder[key]] * rng.choice((1, 3, 1_000))
    elif kind == 5 and isinstance(holder[key], int | float):
        holder[key] = rng.choice((holder[key] + 1, holder[key] - 1, -holder[key], holder[key] * 1000, str(holder[key])))
    else:
        holder[key] = rng.choice(VALUES)
    return value


def inner_places(value):
    """Yield the container and the key of each nested value."""
    left = [value]
    while left:
        holder = left.pop()
        for key, item in enumerate(holder) if isinstance(holder, list) else list(holder.items()):
            yield holder, key
            if isinstance(item, dict | list):
                left.append(item)


def json_text(raw: bytes, rng: random.Random) -> bytes:
    """Change the values of a JSON file, or repeat a key; keep any numbers and half surrogate pairs."""
    shown = json.dumps(changed(json.loads(raw), rng), indent=rng.choice((None, 1)))
    return (shown.replace("{", '{"version": null, ', 1) if rng.random() < 0.05 else shown).encode()


def json_lines(raw: bytes, rng: random.Random) -> bytes:
    lines = raw.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(changed(json.loads(lines[at]), rng)).encode()
    return b"\n".join(lines) + b"\n"


def yaml_text(raw: bytes, rng: random.Random) -> bytes:
    """Change the values of a YAML file, or insert syntax that JSON lacks."""
    if rng.random() < 0.3:
        lines = raw.decode().split("\n")
        at = rng.randrange(len(lines))
        lines[at] = lines[at].partition(":")[0] + ": " + rng.choice(YAML_PIECES)
        return "\n".join(lines).encode()
    value = changed(yaml.safe_load(raw), rng)
    return (json.dumps(value) if rng.random() < 0.5 else yaml.safe_dump(value)).encode("utf-8", "surrogatepass")


def packed(raw: bytes, rng: random.Random) -> bytes:
    for module in PACKERS.values():
        with suppress(Exception):
            inside = module.decompress(raw)
            name = "x.tar" if inside[257:262] == b"ustar" else "x.tsv" if b"\t" in inside[:200] else "x.bin"
            return module.compress(mutated(name, inside, rng))
    raise ValueError("packed in no known way")


def zipped(raw: bytes, rng: random.Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
        kinds = [info.compress_type for info in archive.infolist()]
    name = rng.choice(sorted(members))
    members[name] = mutated(name, members[name], rng)
    if rng.random() < 0.1:
        members[rng.choice(("x", "../x", "/x", "a.npy"))] = members.pop(name)
    new = io.BytesIO()
    with zipfile.ZipFile(new, "w", kinds[0] if rng.random() < 0.8 else zipfile.ZIP_LZMA) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return new.getvalue()


def png(raw: bytes, rng: random.Random) -> bytes:
    at, pieces = 8, []
    while at < len(raw):
        (length,) = struct.unpack_from(">I", raw, at)
        pieces.append((raw[at + 4 : at + 8], raw[at + 8 : at + 8 + length]))
        at += 12 + length
    i = rng.randrange(len(pieces))
    kind, content = pieces[i]
    if kind == b"IDAT" and rng.random() < 0.5:
        content = zlib.compress(any_bytes(zlib.decompress(content), rng))
    elif rng.random() < 0.2:
        kind = rng.choice((b"tEXt", b"zTXt", b"iCCP", b"PLTE", b"tRNS", b"acTL", b"fdAT", b"gAMA", b"eXIf"))
    else:
        content = any_bytes(content, rng)
    pieces[i] = kind, content
    return raw[:8] + b"".join(png_piece(kind, content) for kind, content in pieces)


def png_piece(kind: bytes, content: bytes) -> bytes:
    """Return a PNG chunk: length, kind, content, checksum."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def npy(raw: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack_from("<H", raw, 8)
    header = raw[10 : 10 + length].decode("latin-1")
    kind = rng.randrange(4)
    if kind == 0:
        dtype = rng.choice(("|O", "|V0", "<U0", "|S0", "<f8", "<M8[ns]", "<c16", "|b1", ">i8", "(2,3)<f4", "x", "<U99"))
        header = re.sub(r"'descr': '[^']*'", f"'descr': '{dtype}'", header)
    elif kind == 1:
        sizes = (0, 1, 2, -1, 10**6, 10**9, 2**40, 2**62, 2**63)
        shape = ", ".join(str(rng.choice(sizes)) for _ in range(rng.randrange(5)))
        header = re.sub(r"'shape': \([^)]*\)", f"'shape': ({shape},)" if shape else "'shape': ()", header)
    elif kind == 2:
        header = header.replace("False", rng.choice(("True", "None", "1", "[" * 90)))
    else:
        header = any_bytes(header.encode("latin-1"), rng).decode("latin-1")
    encoded = header.encode("latin-1", "replace")[:60_000]
    return raw[:8] + struct.pack("<H", len(encoded)) + encoded + raw[10 + length :]


DTYPES = ("F64", "I8", "BOOL", "BF16", "U64", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "C64", "X", 1)
SHAPES = ([], [0], [0, 2**62], [2**62], [-1], [1] * 99, [2**63], [1.5])


def safetensors(raw: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    tensors, meta = [name for name in header if name != "__metadata__"], header.get("__metadata__", {})
    kind = rng.randrange(6)
    if kind == 0 and tensors:
        header[rng.choice(tensors)]["dtype"] = rng.choice(DTYPES)
    elif kind == 1 and tensors:
        header[rng.choice(tensors)]["shape"] = rng.choice(SHAPES)
    elif kind == 2 and len(tensors) > 1:
        a, b = rng.sample(tensors, 2)
        header[a], header[b] = header[b], header[a]
    elif kind == 3 and meta:
        key = rng.choice(sorted(meta))
        try:
            meta[key] = json.dumps(changed(json.loads(meta[key]), rng))
        except ValueError:
            meta[key] = str(rng.choice(TEXTS))
    elif kind == 4 and tensors:
        header[str(rng.choice(TEXTS))] = header.pop(rng.choice(tensors))
    else:
        header = changed(header, rng)
    shown = json.dumps(header).encode()
    return struct.pack("<Q", len(shown)) + shown + raw[8 + length :]


def shard(raw: bytes, rng: random.Random) -> bytes:
    """Change the head of a token shard, or its tokens and documents, with fitting checksums."""
    _, _, length, _ = struct.unpack_from("<8sII32s", raw)
    head, body = json.loads(raw[48 : 48 + length]), raw[4_096:]
    if rng.random() < 0.5:
        head = changed(head, rng)
    else:
        data, size = bytearray(body), rng.choice((1, 8))
        at = rng.randrange(len(data)) if rng.random() < 0.5 else max(0, len(data) - 8 * rng.randrange(1, 4))
        data[at : at + size] = rng.choice((0, 1, 2**63, 2 ** (8 * size) - 1, 77)).to_bytes(8, "little")[:size]
        body = bytes(data)[: len(body)]
    return sealed_shard(head, body)


def sealed_shard(head, body: bytes) -> bytes:
    """Return a token shard with this head and body and fitting checksums."""
    if isinstance(head, dict) and "sha256" in head:
        head["sha256"] = hashlib.sha256(body).hexdigest()
    shown = json.dumps(head).encode()[: 4_096 - 48]
    start = struct.pack("<8sII32s", b"SUBQUADT", 1, len(shown), hashlib.sha256(shown).digest()) + shown
    return start.ljust(4_096, b"\0") + body


SIZES = (b"\x80" + b"\xff" * 11, b"\xff" * 12, b"77777777777\0", b"00000000000\0", b"-0000000001\0")


def tar(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    at = rng.choice([at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"])
    kind = rng.randrange(4)
    if kind == 0:
        data[at + 124 : at + 136] = rng.choice(SIZES)
    elif kind == 1:
        data[at + 156 : at + 157] = rng.choice((b"0", b"1", b"2", b"3", b"5", b"6", b"L", b"K", b"S", b"x", b"g", b"X"))
    elif kind == 2:
        data[at : at + 20] = rng.choice((b"../../../x", b"/etc/x", b"", b"a/" * 9, b"\xff\xfe")).ljust(20, b"\0")
    else:
        data[at : at + 512] = any_bytes(bytes(data[at : at + 512]), rng)[:512].ljust(512, b"\0")
    return sealed_tar(data, at)


def sealed_tar(data: bytearray, at: int = 0) -> bytes:
    """Return a tar archive with a fitting checksum in the header at `at`."""
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)
