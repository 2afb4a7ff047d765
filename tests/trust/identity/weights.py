"""Weight files that differ in little, and what reads them."""

import json
import random
import shutil
import struct

SIGN = 0x80
"""Of the second byte of a bf16: the number with the other sign."""


def tensors(file):
    """(name, begin, end, shape) of a safetensors file, as offsets in the file."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    for name, one in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (offset + 8 + length for offset in one["data_offsets"])
            yield name, begin, end, one["shape"]


def flip(file, offset, bits=SIGN):
    """Change one byte; length, name and times stay those of a copy."""
    with file.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ bits]))


def byte_of(tensor, seed, file="model.safetensors"):
    """One byte of this tensor."""

    def change(model):
        place = model / file
        ((begin, end),) = [(b, e) for name, b, e, _ in tensors(place) if name == tensor]
        draw = random.Random(seed)
        flip(place, begin + 2 * draw.randrange((end - begin) // 2) + 1)

    return change


def embedding_of(token):
    """One byte of what this token is embedded as."""

    def change(model):
        place = model / "model.safetensors"
        for name, begin, _, shape in tensors(place):
            if name == "model.embed_tokens.weight":
                flip(place, begin + 2 * (token * shape[1] + shape[1] // 2) + 1)

    return change


def last_byte(model):
    place = model / "model.safetensors"
    flip(place, place.stat().st_size - 1)


def rows_swapped(tensor):
    """Two rows change places: an edited model keeps most of its bytes."""

    def change(model):
        place = model / "model.safetensors"
        data = bytearray(place.read_bytes())
        ((begin, end, shape),) = [(b, e, s) for name, b, e, s in tensors(place) if name == tensor]
        size = (end - begin) // shape[0]
        one, other = begin + size, begin + (shape[0] // 2 + 1) * size
        data[one : one + size], data[other : other + size] = (
            data[other : other + size],
            data[one : one + size],
        )
        place.write_bytes(data)

    return change


def unsampled(count=64, window=4096):
    """Every row of two matrices that a digest of evenly spaced samples does not see is put in
    another's place, as an edited model keeps its names, sizes and most of its bytes."""

    def change(model):
        place = model / "model.safetensors"
        raw = place.read_bytes()
        data, samples = (
            bytearray(raw),
            [max(0, len(raw) - window) * index // (count - 1) for index in range(count)],
        )
        for name, begin, end, shape in tensors(place):
            if not name.endswith(("0.self_attn.v_proj.weight", "0.mlp.down_proj.weight")):
                continue
            size = (end - begin) // shape[0]
            free = [
                row
                for row in range(shape[0])
                if not any(
                    at < begin + (row + 1) * size and at + window > begin + row * size
                    for at in samples
                )
            ]
            for to, of in zip(free, reversed(free), strict=True):
                data[begin + to * size : begin + (to + 1) * size] = raw[
                    begin + of * size : begin + (of + 1) * size
                ]
        place.write_bytes(data)

    return change


def as_pickle(model, edit):
    """The weights once more, changed, in the form that load format ``pt`` reads."""
    import torch
    from safetensors.torch import load_file

    weights = load_file(model / "model.safetensors")
    edit(weights)
    torch.save(weights, model / "weights.pt")


def negated(weights):
    """An edit that no answer survives."""
    for name, weight in weights.items():
        if "v_proj" in name:
            weights[name] = -weight


def touched(model):
    """The same bytes with other times."""
    for file in model.iterdir():
        file.touch()


def second_seed(make):
    """The whole checkpoint drawn anew, its names and sizes kept."""

    def change(model):
        aside = model.with_name("aside")
        make(aside, 1)
        shutil.copyfile(aside / "model.safetensors", model / "model.safetensors")

    return change
