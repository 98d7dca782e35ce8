"""Wrong indexes, manifests and headers: JSON that is changed where its structure is, with the checksums made to fit.

A document is a tree of `Members`, lists and plain values; `Raw` is text that no Python value stands for.
"""

from __future__ import annotations

import json
import random
import zlib
from copy import deepcopy
from dataclasses import dataclass


class Members(list):
    """The members of a JSON object as pairs: a key may be there twice."""


@dataclass(frozen=True, slots=True)
class Raw:
    """JSON text, or text that should not be in JSON."""

    text: str


ODD_VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    2**31,
    2**63,
    -(2**63) - 1,
    10**25,
    "",
    "x",
    "F64",
    "../model.safetensors",
    "/etc/passwd",
    "a\0b",
    "x" * 5000,
    [],
    [1],
    [-1, 4],
    [0] * 100,
    Members(),
    Members([["a", 1], ["a", 2]]),
    Raw("NaN"),
    Raw("-Infinity"),
    Raw("1e999"),
    Raw("0123"),
    Raw("'x'"),
    Raw('"\\ud800"'),
    Raw('"\t"'),
    Raw(""),
    Raw("9" * 5000),
    Raw("[" * 12 + "]" * 12),
    Raw('{"a":' * 3000 + "1" + "}" * 3000),
]


def tree_of(text):
    """Returns the tree of a JSON text."""
    return json.loads(text, object_pairs_hook=lambda pairs: Members([list(pair) for pair in pairs]))


def text_of(tree):
    """Returns the text of a tree."""
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, Members):
        return "{" + ",".join(f"{text_of(key)}:{text_of(value)}" for key, value in tree) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(text_of, tree)) + "]"
    return json.dumps(tree)


def mutated(text, rng):
    """Returns the bytes of a JSON text after one to three changes, and what they were."""
    tree, notes = tree_of(text), []
    for _ in range(rng.randint(1, 3)):
        notes.append(_mutate(tree, rng))
    raw = text_of(tree).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        raw, note = _mutate_bytes(raw, rng)
        notes.append(note)
    return raw, "; ".join(notes)


def _places(tree):
    """Returns every list that something can be changed in."""
    found = [tree] if isinstance(tree, list) else []
    for item in tree if isinstance(tree, list) else ():
        found += _places(item[1] if isinstance(tree, Members) else item)
    return found


def _mutate(tree, rng):
    place = rng.choice(_places(tree))
    ways = (
        [_insert]
        if not place
        else [_delete, _repeat, _swap, _replace, _replace, _nudge, _nudge, _nest, _insert, _rename]
    )
    way = rng.choice(ways)
    way(place, rng)
    return f"{way.__name__.strip('_')} in {text_of(place)[:60]}"


def _delete(place, rng):
    del place[rng.randrange(len(place))]


def _repeat(place, rng):
    place.append(deepcopy(rng.choice(place)))


def _swap(place, rng):
    one, other = rng.randrange(len(place)), rng.randrange(len(place))
    if isinstance(place, Members):
        place[one][1], place[other][1] = place[other][1], place[one][1]
    else:
        place[one], place[other] = place[other], place[one]


def _replace(place, rng):
    _set(place, rng.randrange(len(place)), _odd(rng))


def _nest(place, rng):
    at = rng.randrange(len(place))
    value = _get(place, at)
    for _ in range(rng.choice([1, 2, 9])):
        value = [value] if rng.random() < 0.5 else Members([["x", value]])
    _set(place, at, value)


def _nudge(place, rng):
    at = rng.randrange(len(place))
    value = _get(place, at)
    if type(value) is int:
        _set(place, at, rng.choice([value + 1, value - 1, value * 2, -value, float(value), str(value), value + 2**32]))
    elif isinstance(value, str):
        _set(
            place, at, rng.choice([value[:-1], value + "x", value.upper(), value[::-1], f"./{value}", value + "\u202e"])
        )


def _odd(rng):
    return deepcopy(rng.choice(ODD_VALUES))  # what is in a tree may be changed later


def _insert(place, rng):
    value = _odd(rng)
    if isinstance(place, Members):
        place.insert(rng.randint(0, len(place)), [rng.choice(["x", "", "__metadata__", "a", "\u0430", "b"]), value])
    else:
        place.insert(rng.randint(0, len(place)), value)


def _rename(place, rng):
    if isinstance(place, Members):
        member = rng.choice(place)
        others = [member[0] + "x", member[0][1:]] if isinstance(member[0], str) else ["x"]
        member[0] = rng.choice([*others, "", "__metadata__", Raw("1"), "a"])


_WAYS = (_delete, _repeat, _swap, _replace, _replace, _nudge, _nudge, _nest, _insert, _rename)


def _get(place, at):
    return place[at][1] if isinstance(place, Members) else place[at]


def _set(place, at, value):
    if isinstance(place, Members):
        place[at][1] = value
    else:
        place[at] = value


def _mutate_bytes(raw, rng):
    at = rng.randrange(len(raw))
    way = rng.choice(["cut", "byte", "gone", "twice"])
    if way == "cut":
        return raw[:at], f"cut at {at}"
    if way == "byte":
        return raw[:at] + rng.randbytes(1) + raw[at + 1 :], f"another byte at {at}"
    if way == "gone":
        return raw[:at] + raw[at + 1 :], f"byte {at} gone"
    return raw + raw, "twice"


# Whole files again, from a document that was changed: what vouches for it is made to fit.


def with_seal(raw):
    """Returns a manifest with its own checksum, in place of the one that it has."""
    body, _, _ = raw.rpartition(b',"crc32":')
    return body + b',"crc32":"%08x"}' % zlib.crc32(body)


def with_header(raw, data):
    """Returns a safetensors file of a header and data."""
    return len(raw).to_bytes(8, "little") + raw + data


def with_head_crc32(file):
    """Returns a file that carries its own record with the checksum of its head."""
    key = b'"booster_head_crc32":"'
    stop = 8 + int.from_bytes(file[:8], "little")
    start = file.find(key, 0, stop) + len(key)
    if start < len(key) or start + 8 > stop:
        return file
    crc32 = zlib.crc32(file[:start] + b"0" * 8 + file[start + 8 : stop])
    return file[:start] + b"%08x" % crc32 + file[start + 8 :]


def odd_versions(text, path):
    """Yields a JSON text with each odd value at one place.

    Args:
        text: The text.
        path: Keys and positions from the top to the place.
    """
    for number, value in enumerate(ODD_VALUES):
        tree = place = tree_of(text)
        for step in path[:-1]:
            place = next(item for key, item in place if key == step) if isinstance(place, Members) else place[step]
        at = path[-1]
        if isinstance(place, Members):
            at = next(index for index, (key, _) in enumerate(place) if key == path[-1])
        if text_of(_get(place, at)) != text_of(value):
            _set(place, at, deepcopy(value))
            yield f"{'.'.join(map(str, path))} = odd value {number}", text_of(tree).encode("utf-8", "surrogatepass")


def random_of(seed):
    """Returns the generator of a case."""
    return random.Random(seed)
