"""The JSON Patch (RFC 6902) of an answer, computed in time linear in the object's size.

For each entry that is removed from a list or moved, jsonpatch searches all former operations. If every second one of
thousands of entries is removed, that would take seconds. jsonpatch also treats equal entries of a list as
interchangeable, so a change may apply to the wrong entry. So jsonpatch never gets a list. Rewritten lists (env,
volumes, mounts, gates) are replaced as a whole. Containers keep their positions and are compared one by one.
"""

from typing import Any

import jsonpatch

from cardwise.core.values.decoded import Json

# Lists whose entries keep their positions: the webhook only changes fields of the entries.
_INDEXED_LISTS = ("/containers", "/initContainers")
_POINTER_FIELDS = ("path", "from")  # the fields of an operation that are JSON pointers


def make_patch(before: Json, after: Json) -> list[Json]:
    """The operations that turn `before` into `after`; neither is changed."""
    return _compare(before, after, "")


def _compare(before: Any, after: Any, path: str) -> list[Json]:
    """The operations for two values at `path` (a JSON pointer)."""
    operations: list[Json] = []
    old, new = _without_lists(before, after, path, operations)
    changes = [] if old is None and new is None else jsonpatch.make_patch(old, new).patch
    return operations + [
        {key: path + field_value if key in _POINTER_FIELDS else field_value for key, field_value in change.items()}
        for change in changes
    ]


def _without_lists(before: Any, after: Any, path: str, operations: list[Json]) -> tuple[Any, Any]:
    """Both values without what is equal in both, and without lists, whose operations are added to `operations`."""
    if before is after:
        return None, None
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = dict(before), dict(after)
        for key in before.keys() & after.keys():
            pointer = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            old[key], new[key] = _without_lists(before[key], after[key], pointer, operations)
            if old[key] is None and new[key] is None:
                # Skip equal values: to compare two values with jsonpatch takes longer than the rest of this function.
                del old[key], new[key]
        return old, new
    if isinstance(before, list) and isinstance(after, list):
        if before == after:
            return None, None
        if path.endswith(_INDEXED_LISTS) and len(before) == len(after):
            for i, (old, new) in enumerate(zip(before, after, strict=True)):
                operations += _compare(old, new, f"{path}/{i}")
        else:
            operations.append({"op": "replace", "path": path, "value": after})
        return None, None
    return before, after
