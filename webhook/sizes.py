"""How large a pod or a pod template may be that the webhook works on.

The API server takes objects of 3 MiB and waits five seconds for us: a pod of 30,000 containers would keep one of our
few threads for longer. Nobody works with such pods, so they are refused before anything looks into them.
"""

from typing import Any, Final

from cardwise.core import request
from cardwise.core.invalid import InvalidRequest
from webhook import containers

Json = dict[str, Any]

MOST_BYTES: Final = 512 * 1024  # of JSON; the annotations of an object alone may have 256 KiB
MOST_CONTAINERS: Final = 128
MOST_NAMES: Final = 64  # of resources, counted once each
MOST_ANNOTATIONS: Final = 512  # of a pod; those of Cardwise are removed one by one


def check(template: Json, size: int, path: str = "") -> None:
    """`template` has the containers, `size` is that of its object in bytes, `path` where the template is in it, with a
    dot behind. Raises InvalidRequest.
    """
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    if len(annotations) > MOST_ANNOTATIONS:
        problem = f"{len(annotations)} are too many for a pod that asks for cards"
        raise InvalidRequest(f"{path}metadata.annotations", problem, f"write at most {MOST_ANNOTATIONS}")
    found = list(request.containers(template))
    if len(found) > MOST_CONTAINERS:
        problem = f"{len(found)} containers are too many for a pod that asks for cards"
        raise InvalidRequest(f"{path}spec.containers", problem, f"write at most {MOST_CONTAINERS}")
    resources = [c.spec.get("resources") or {} for c in found]
    asked = {name for each in resources for _, amounts in containers.lists(each) for name in amounts}
    if len(asked) > MOST_NAMES:
        problem = f"the containers name {len(asked)} different resources, which is too many for a pod"
        raise InvalidRequest(f"{path}spec.containers", problem, f"name at most {MOST_NAMES} in limits and requests")
    if size > MOST_BYTES:
        problem = f"the object has {size >> 10} KiB, which is too much for one that asks for cards"
        raise InvalidRequest("metadata", problem, f"bring it below {MOST_BYTES >> 10} KiB")
