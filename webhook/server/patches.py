"""The JSON Patch (RFC 6902) of an answer, in time that grows with the object and no faster.

jsonpatch looks through its own operations for each entry that it takes out of a list or moves, so a list of thousands
of entries, of which we remove each second one, would keep a thread for seconds. Lists of objects that we rewrite (env,
volumes, mounts, gates) are therefore replaced whole; jsonpatch compares the rest.
"""

from typing import Any

import jsonpatch

from cardwise.core.values.decoded import Json

_PLACED = ("/containers", "/initContainers")  # lists whose entries keep their places: we change their fields


def between(before: Json, after: Json) -> list[Json]:
    """What makes `after` of `before`; neither is changed."""
    operations: list[Json] = []
    old, new = _without_lists(before, after, "", operations)
    return operations + jsonpatch.make_patch(old, new).patch


def _without_lists(before: Any, after: Any, path: str, operations: list[Json]) -> tuple[Any, Any]:
    """Both sides without what is equal or was replaced: that needs no second look."""
    if before is after:
        return None, None
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = dict(before), dict(after)
        for key in before.keys() & after.keys():
            where = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            old[key], new[key] = _without_lists(before[key], after[key], where, operations)
            if old[key] is None and new[key] is None:
                del old[key], new[key]  # jsonpatch takes longer to compare two values than all else takes here
        return old, new
    if isinstance(before, list) and isinstance(after, list):
        if before == after:
            return None, None
        if path.endswith(_PLACED) and len(before) == len(after):
            pairs = zip(before, after, strict=True)
            sides = [_without_lists(*pair, f"{path}/{i}", operations) for i, pair in enumerate(pairs)]
            return [old for old, _ in sides], [new for _, new in sides]
        operations.append({"op": "replace", "path": path, "value": after})
        return None, None
    return before, after
